// The one way in which most kernels share out their work: a matrix [rows, cols] (a vector is one
// row) over a two-dimensional launch. Threads take rows along y and packs of kPack columns along x,
// each with a stride of the whole launch; columns after the last pack go one by one.
//
// A kernel is a functor with
//   template <class Cols> void Row(int64_t row, const Cols& cols) const
// which calls cols.Each([&](auto width, int64_t col) {...}) for what it does to `width` columns
// from col on; every thread of a row's x calls it with its own columns.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {

// One thread's columns. kAligned: every row begins at a multiple of 16 bytes.
template <bool kAligned>
struct ThreadCols {
  int64_t cols;
  int64_t thread, threads;

  ZS_HOST_DEVICE bool first() const { return thread == 0; }

  template <class G>
  ZS_HOST_DEVICE void Each(const G& g) const {
    const int64_t packs = kAligned ? cols / kPack : 0;
    for (int64_t pack = thread; pack < packs; pack += threads) {
      g(std::integral_constant<int, kPack>(), pack * kPack);
    }
    for (int64_t col = packs * kPack + thread; col < cols; col += threads) {
      g(std::integral_constant<int, 1>(), col);
    }
  }
};

struct EachPlan {
  bool aligned = false;
  int threads_x = 1, threads_y = 1;  // of a block
  int64_t blocks_x = 1, blocks_y = 1;
};

// What thread (thread_x, thread_y) of block (block_x, block_y) does.
template <bool kAligned, class F>
ZS_HOST_DEVICE void EachOfThread(const F& f, int64_t rows, int64_t cols, const EachPlan& plan,
                                 int64_t block_x, int64_t block_y, int thread_x, int thread_y) {
  const ThreadCols<kAligned> mine{cols, block_x * plan.threads_x + thread_x,
                                  plan.blocks_x * plan.threads_x};
  for (int64_t row = block_y * plan.threads_y + thread_y; row < rows;
       row += plan.blocks_y * plan.threads_y) {
    f.Row(row, mine);
  }
}

// Whether rows of `cols` elements that begin at these addresses can be read by 16-byte words.
inline bool AreAligned(int64_t rows, int64_t cols, std::initializer_list<const void*> pointers) {
  if (rows > 1 && cols % kPack != 0) return false;
  return std::ranges::all_of(
      pointers, [](const void* p) { return reinterpret_cast<uintptr_t>(p) % sizeof(Word) == 0; });
}

// Blocks of up to 256 threads, as many as there is work for (up to about 2^16); each thread has at
// least `packs_a_thread` packs of a row where there are so many. rows and cols are positive.
inline EachPlan PlanEach(int64_t rows, int64_t cols, bool aligned, int64_t packs_a_thread = 1) {
  constexpr int64_t kThreads = 256, kBlocks = 1 << 16, kBlocksY = 65535;
  const int64_t units =
      CeilDiv(aligned ? std::max<int64_t>(cols / kPack, 1) : cols, packs_a_thread);
  const auto fill = [](int64_t wanted, int64_t limit) {
    return std::min(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(wanted))), limit);
  };
  EachPlan plan;
  plan.aligned = aligned;
  plan.threads_x = static_cast<int>(fill(units, kThreads));
  plan.threads_y = static_cast<int>(fill(rows, kThreads / plan.threads_x));
  plan.blocks_x = std::min(CeilDiv(units, plan.threads_x), kBlocks);
  plan.blocks_y = std::clamp<int64_t>(CeilDiv(rows, plan.threads_y), 1,
                                      std::clamp<int64_t>(kBlocks / plan.blocks_x, 1, kBlocksY));
  return plan;
}

// A functor with `template <int N> void At(int64_t i) const` for N elements of vectors from i on.
template <class F>
struct Flat {
  F f;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t, const Cols& cols) const {
    cols.Each([&](auto width, int64_t i) { f.template At<decltype(width)::value>(i); });
  }
};
template <class F>
Flat(F) -> Flat<F>;

// A functor with `void At(int64_t i) const` for one element.
template <class F>
struct OneByOne {
  F f;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t, const Cols& cols) const {
    cols.Each([&](auto width, int64_t i) {
      for (int k = 0; k < decltype(width)::value; ++k) f.At(i + k);
    });
  }
};
template <class F>
OneByOne(F) -> OneByOne<F>;

}  // namespace zeroshard::cuda
