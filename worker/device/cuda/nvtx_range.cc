#include "worker/device/cuda/nvtx_range.h"

#if ZEROSHARD_NVTX  // of the build: the toolkit is there
#include <nvtx3/nvToolsExt.h>

namespace zeroshard::cuda {
NvtxRange::NvtxRange(const char* name) { nvtxRangePushA(name); }
NvtxRange::~NvtxRange() { nvtxRangePop(); }
bool HasNvtx() { return true; }
}  // namespace zeroshard::cuda

#else

namespace zeroshard::cuda {
NvtxRange::NvtxRange(const char* /*name*/) {}
NvtxRange::~NvtxRange() {}
bool HasNvtx() { return false; }
}  // namespace zeroshard::cuda

#endif
