// Asks a grpc.health.v1 server, as a supervisor's probe does.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace zeroshard {

// Whether `service` ("": the server as a whole) is serving at `address`, host:port, in plain text.
// Waits at most `timeout`.
// UNAVAILABLE: nobody answers there in time, or not with health checks. NOT_FOUND: no such service
// there. INVALID_ARGUMENT: no host:port.
absl::StatusOr<bool> CheckHealth(const std::string& address, const std::string& service,
                                 absl::Duration timeout);

}  // namespace zeroshard
