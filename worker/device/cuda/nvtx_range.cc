#include "worker/device/cuda/nvtx_range.h"

#if ZEROSHARD_NVTX  // of the build: the toolkit is there
#include <nvtx3/nvToolsExt.h>

namespace zeroshard::cuda {
void BeginNvtxRange(const char* name) { nvtxRangePushA(name); }
void EndNvtxRange() { nvtxRangePop(); }
bool HasNvtx() { return true; }
}  // namespace zeroshard::cuda

#else

namespace zeroshard::cuda {
void BeginNvtxRange(const char* /*name*/) {}
void EndNvtxRange() {}
bool HasNvtx() { return false; }
}  // namespace zeroshard::cuda

#endif
