// Why a server could not be spoken to, where TLS is the reason. gRPC says that a handshake failed,
// or only that a socket was closed; so the server is asked once more, with OpenSSL itself.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/security/security.h"

namespace zeroshard::security {

// What is wrong, which option it is about and what to do, as a sentence without its end; empty
// where TLS is not the reason, nobody listens, or the server does not answer within `budget`.
// `role`: what the server's certificate should be for. Blocks; thread-safe.
std::string TlsTrouble(const Security& security, const std::string& address, Role role,
                       absl::Duration budget);

}  // namespace zeroshard::security
