// host:port as text, and whether it can be listened on.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace zeroshard {

struct HostPort {
  std::string host;  // without brackets
  int port = 0;

  std::string ToString() const;  // IPv6 hosts in brackets
};

// "127.0.0.1:50051", "[::1]:0", "my-host:7000". INVALID_ARGUMENT says what is wrong.
absl::StatusOr<HostPort> ParseHostPort(absl::string_view text);

// Binds and lets go again, on every address that the host has. UNAVAILABLE: another process listens
// there (`what` and the way out are in the message); INVALID_ARGUMENT: no such host, not ours, or
// not allowed. Only a diagnosis: somebody may take the port right after.
absl::Status ProbeListen(const HostPort& address, absl::string_view what);

}  // namespace zeroshard
