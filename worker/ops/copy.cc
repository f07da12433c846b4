// Copy, Zero and CopyRows.
#include <cstdint>
#include <cstring>

#include "common/kernels/parallel.h"
#include "worker/ops/vector_ops.h"

namespace zeroshard::cpu {
namespace {

// One core moves this much in tens of microseconds: what a team takes to start is little beside it.
constexpr int64_t kBytesPerThread = int64_t{1} << 18;

}  // namespace

void Copy(void* to, const void* from, size_t bytes, int threads) {
  ParallelRanges(
      static_cast<int64_t>(bytes), 64, kBytesPerThread, threads, [&](int64_t begin, int64_t end) {
        std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                    static_cast<size_t>(end - begin));
      });
}

void Zero(void* to, size_t bytes, int threads) {
  ParallelRanges(static_cast<int64_t>(bytes), 64, kBytesPerThread, threads,
                 [&](int64_t begin, int64_t end) {
                   std::memset(static_cast<char*>(to) + begin, 0, static_cast<size_t>(end - begin));
                 });
}

void CopyRows(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t rows,
              int64_t bytes, int threads) {
  if (bytes <= 0) return;
  ParallelRanges(rows, 1, CeilDiv(kBytesPerThread, bytes), threads,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     std::memcpy(static_cast<char*>(to) + row * to_stride,
                                 static_cast<const char*>(from) + row * from_stride,
                                 static_cast<size_t>(bytes));
                   }
                 });
}

}  // namespace zeroshard::cpu
