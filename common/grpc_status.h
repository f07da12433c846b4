// absl::Status and grpc::Status have the same codes; these carry one into the other.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace zeroshard {

// A status travels in headers, 8 KiB of them, with up to three bytes for one; a longer message
// would arrive as an error of its own. Cut between characters.
inline constexpr size_t kMostStatusBytes = 2048;

inline grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message());
  if (message.size() > kMostStatusBytes) {
    size_t end = kMostStatusBytes - 3;
    while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xc0) == 0x80) --end;
    message.resize(end);
    message += "...";
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message);
}

inline absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace zeroshard
