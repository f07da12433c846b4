#include "worker/comm/nccl/nccl_errors.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace zeroshard {

absl::Status NcclError(NcclApi* api, NcclResult result, NcclComm* comm, const std::string& call) {
  const std::string text = absl::StrCat(call, " failed: ", api->Describe(result, comm));
  switch (result) {
    case NcclResult::kRemoteError:
      return absl::UnavailableError(
          absl::StrCat(text, "; a peer is gone or cannot be reached (NCCL does not tell which)"));
    case NcclResult::kSystemError:
      return absl::UnavailableError(
          absl::StrCat(text,
                       "; a system call failed, most likely because a peer is gone or the network "
                       "interface is the wrong one (NCCL_SOCKET_IFNAME chooses it, "
                       "NCCL_DEBUG=INFO tells more)"));
    case NcclResult::kInvalidUsage:
      return absl::FailedPreconditionError(absl::StrCat(
          text, "; every rank needs a GPU of its own, and all the same version of NCCL"));
    case NcclResult::kUnhandledCudaError:
      return absl::InternalError(
          absl::StrCat(text, "; the GPU or its driver failed (NCCL_DEBUG=INFO tells more)"));
    default:
      return absl::InternalError(absl::StrCat(text, " (NCCL_DEBUG=INFO tells more)"));
  }
}

absl::Status Prefixed(const std::string& what, const absl::Status& status) {
  absl::Status prefixed(status.code(), absl::StrCat(what, ": ", status.message()));
  status.ForEachPayload([&prefixed](absl::string_view key, const absl::Cord& payload) {
    prefixed.SetPayload(key, payload);
  });
  return prefixed;
}

}  // namespace zeroshard
