// NCCL's functions, loaded when a worker is told to use it: one that computes on the CPU neither
// needs the library nor waits for it.
#pragma once

#include <nccl.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"

#define ZS_NCCL_FUNCTIONS(X) \
  X(ncclAllGather)           \
  X(ncclAllReduce)           \
  X(ncclBroadcast)           \
  X(ncclCommAbort)           \
  X(ncclCommDeregister)      \
  X(ncclCommDestroy)         \
  X(ncclCommFinalize)        \
  X(ncclCommGetAsyncError)   \
  X(ncclCommInitRankConfig)  \
  X(ncclCommRegister)        \
  X(ncclGetErrorString)      \
  X(ncclGetLastError)        \
  X(ncclGetUniqueId)         \
  X(ncclGetVersion)          \
  X(ncclGroupEnd)            \
  X(ncclGroupStart)          \
  X(ncclRecv)                \
  X(ncclReduceScatter)       \
  X(ncclSend)

namespace zeroshard {

// None is null in a table that was loaded.
struct NcclLibrary {
#define ZS_MEMBER(function) decltype(&::function) function = nullptr;
  ZS_NCCL_FUNCTIONS(ZS_MEMBER)
#undef ZS_MEMBER
};

// The table of the process. The first call loads it and every later one has the same answer;
// thread-safe; lives as long as the process. No GPU is needed. FAILED_PRECONDITION where the
// library or a function of it is missing.
absl::StatusOr<const NcclLibrary*> LoadNccl();

// The same of the first of `names` that is found, and anew each time.
absl::StatusOr<NcclLibrary> LoadNccl(const std::vector<std::string>& names);

}  // namespace zeroshard
