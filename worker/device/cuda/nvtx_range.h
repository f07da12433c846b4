// Names stretches of a thread's time for NVIDIA's profilers.
#pragma once

namespace zeroshard::cuda {

// A range of this thread, within the one that is open; `name` is copied. Nothing happens without a
// profiler, or where the build has no NVTX headers.
void BeginNvtxRange(const char* name);
void EndNvtxRange();

// Whether this build has NVTX.
bool HasNvtx();

}  // namespace zeroshard::cuda
