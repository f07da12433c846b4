#include "worker/comm/nccl/cuda/nccl_library.h"

#include "common/status_macros.h"
#include "worker/device/cuda/dynamic_library.h"

namespace zeroshard {

absl::StatusOr<NcclLibrary> LoadNccl(const std::vector<std::string>& names) {
  ZS_ASSIGN_OR_RETURN(
      const cuda::DynamicLibrary library,
      cuda::DynamicLibrary::Open(
          "NCCL", names,
          "install NCCL 2 (the package libnccl2), name the folder that has it in LD_LIBRARY_PATH, "
          "or use --collectives gloo"));
  NcclLibrary table;
#define ZS_FIND(function) ZS_RETURN_IF_ERROR(library.Find(#function, &table.function));
  ZS_NCCL_FUNCTIONS(ZS_FIND)
#undef ZS_FIND
  return table;
}

absl::StatusOr<const NcclLibrary*> LoadNccl() {
  static const auto* const loaded =
      new absl::StatusOr<NcclLibrary>(LoadNccl({"libnccl.so.2", "libnccl.so"}));
  if (!loaded->ok()) return loaded->status();
  return &**loaded;
}

}  // namespace zeroshard
