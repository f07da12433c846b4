#include "worker/device/cuda/nvtx_range.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
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
