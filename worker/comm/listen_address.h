// The address a rank listens on.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace zeroshard {

// A numeric address of this host that can be bound: of the interface named `host`, or what the name
// or address `host` resolves to. Empty: what this host's own name resolves to unless that is
// loopback, else the first interface that is up and no loopback, else 127.0.0.1. INVALID_ARGUMENT
// names `host` where it is none of these or belongs to another machine.
absl::StatusOr<std::string> ResolveListenAddress(const std::string& host);

}  // namespace zeroshard
