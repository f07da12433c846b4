// --memory-limit is the limit of the whole process: what of it is left for training state.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace zeroshard::store {

// What of this process is in memory now, its program and libraries included; 0 where
// /proc/self/statm does not say.
uint64_t ResidentBytes();

// What a process takes beside the state of jobs once it serves: `resident`, which it took at its
// start, and
//   kServingBytes   gRPC, the metrics server, and messages of at most 1 MiB on their way: two
//                   streams of each of eight ranks. Each rank more takes kRankBytes
//   kWritersBytes   who writes snapshots, all jobs together (state/writer_buffer.h)
//   kThreadBytes    for each thread that computes: stacks, values on their way from a file
constexpr uint64_t kServingBytes = uint64_t{24} << 20;
constexpr uint64_t kRankBytes = uint64_t{2} << 20;
constexpr uint64_t kWritersBytes = uint64_t{16} << 20;
constexpr uint64_t kThreadBytes = uint64_t{512} << 10;
uint64_t BesideState(uint64_t resident, int threads);

// What jobs may take of a limit. INVALID_ARGUMENT, with the numbers: the process alone takes all of
// it.
absl::StatusOr<uint64_t> StateBytes(uint64_t limit, uint64_t resident, int threads);

}  // namespace zeroshard::store
