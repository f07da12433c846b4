// gRPC's own lines. Whoever reaches a port can make it write as many as they like, and of a
// handshake that it refuses nothing but a line tells.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace zeroshard {

// So many lines at once, then so many a second. Pure. Not thread-safe.
class LineBudget {
 public:
  LineBudget(double burst, double per_second)
      : burst_(burst), per_second_(per_second), left_(burst) {}

  // Whether a line may be written at `now` (monotonic); `left_out`: how many were not since the
  // last one that was.
  bool Take(absl::Duration now, uint64_t* left_out);

 private:
  const double burst_, per_second_;
  double left_;
  absl::Duration refilled_ = -absl::InfiniteDuration();
  uint64_t left_out_ = 0;
};

// Once for a process that serves: errors of gRPC are written by our log, 10 at once and then one in
// 5 s, refused handshakes likewise, and counted (security::Refusal::kHandshake). Lines that
// GRPC_VERBOSITY and GRPC_TRACE ask for have no bound.
void GuardGrpcLog();

// For a program whose messages are for people: nothing of gRPC's is written, unless GRPC_VERBOSITY
// or GRPC_TRACE ask for it.
void SilenceGrpcLog();

}  // namespace zeroshard
