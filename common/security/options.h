// The options of every program that speaks or serves gRPC.
#pragma once

#include "CLI/App.hpp"
#include "common/security/security.h"

namespace zeroshard::security {

// What the options are called in the environment.
inline constexpr const char* kVariables[] = {"ZEROSHARD_TLS_CERT", "ZEROSHARD_TLS_KEY",
                                             "ZEROSHARD_TLS_CA", "ZEROSHARD_TOKEN_FILE",
                                             "ZEROSHARD_INSECURE"};

// --tls-cert, --tls-key, --tls-ca, --insecure and, for those who have a use for tokens,
// --token-file; also from the environment (ZEROSHARD_TLS_CERT ...). `options` outlives `app`.
void AddSecurityOptions(CLI::App* app, SecurityOptions* options, Role own);

}  // namespace zeroshard::security
