// Names stretches of a thread's time for NVIDIA's profilers.
#pragma once

namespace zeroshard::cuda {

// From construction to destruction, on this thread; ranges nest. `name` is copied. Nothing happens
// without a profiler, or where the build has no NVTX headers.
class NvtxRange {
 public:
  explicit NvtxRange(const char* name);
  ~NvtxRange();
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

// Whether this build has NVTX.
bool HasNvtx();

}  // namespace zeroshard::cuda
