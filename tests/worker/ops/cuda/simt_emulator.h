// Runs the body of a CUDA kernel on the host, a thread of the block at a time, with the operations
// of worker/ops/cuda/attention_simt.cuh as PTX ISA 8.0 defines them. It is made to find mistakes:
// * Threads are fibers that run up to their next barrier or warp operation, the lanes of a warp in
// a
//   random order; one warp runs ahead as far as barriers let it, another one after a random while.
//   So a missing barrier changes results between seeds.
// * Shared memory is full of NaN before a block, and checked for writes behind its end.
// * An asynchronous copy happens either at once or only when it is waited for, by a coin.
// * Lanes of a warp that meet in different operations, misaligned or foreign shared addresses, and
//   blocks that never end are errors; ldmatrix calls with bank conflicts are counted.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {

class BlockEmulator {
 public:
  BlockEmulator(int threads, size_t shared_bytes, uint32_t seed)
      : random_(seed),
        shared_(shared_bytes + kAlign + kGuard),
        fibers_(static_cast<size_t>(threads)),
        warps_(static_cast<size_t>(threads) / 32) {
    const auto at = reinterpret_cast<uintptr_t>(shared_.data());
    base_ = shared_.data() + (kAlign - at % kAlign) % kAlign;
    shared_bytes_ = shared_bytes;
  }

  class Simt;
  using Body = std::function<void(const Simt&, void* shared)>;

  // Runs blocks 0 to count - 1. False, and error() says why, at the first mistake.
  bool Run(int64_t count, const Body& body) {
    for (int64_t block = 0; block < count && error_.empty(); ++block) RunBlock(block, body);
    return error_.empty();
  }
  const std::string& error() const { return error_; }
  int64_t bank_conflicts() const { return bank_conflicts_; }

 private:
  static constexpr size_t kAlign = 128, kGuard = 1024, kStack = size_t{1} << 18;
  enum class Kind { kNone, kSync, kShuffle, kLoad, kLoadTransposed, kMultiplyBf16, kMultiplyFp16 };

  struct Copy {
    char* to;
    const char* from;
    size_t bytes;
    bool valid;
    int64_t group;
  };
  struct Fiber {
    std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStack);
    ucontext_t start;
    jmp_buf at;
    bool started = false;
    const uint64_t* waits_for = nullptr;  // runnable when it differs from `seen`
    uint64_t seen = 0;
    bool done = false;
    int64_t groups = 0;
    std::vector<Copy> copies;
  };
  // What a lane brings to an operation of its warp, and where it wants the result.
  struct Lane {
    float value = 0;
    int bits = 0;
    const char* address = nullptr;
    uint32_t* registers = nullptr;
    std::array<uint32_t, 4> a{};
    std::array<uint32_t, 2> b{};
    float* c = nullptr;
  };
  struct Meeting {
    int expected = 0, arrived = 0;
    uint64_t times = 0;
    Kind kind = Kind::kNone;
    std::array<Lane, 32> lanes;
  };

  void RunBlock(int64_t block, const Body& body) {
    std::memset(base_, 0xFF, shared_bytes_ + kGuard);
    body_ = &body;
    block_ = block;
    everyone_ = {};
    everyone_.expected = static_cast<int>(fibers_.size());
    for (Meeting& warp : warps_) {
      warp = {};
      warp.expected = 32;
    }
    for (size_t i = 0; i < fibers_.size(); ++i) Start(i);
    std::vector<size_t> order(warps_.size());  // the first warp that can run does
    std::iota(order.begin(), order.end(), size_t{0});
    int rounds = 0;  // until the order changes
    while (error_.empty() && !AllDone()) {
      if (rounds-- == 0) {
        std::shuffle(order.begin(), order.end(), random_);
        rounds = static_cast<int>(random_() % 200);
      }
      const bool ran =
          std::any_of(order.begin(), order.end(), [&](size_t w) { return RunWarp(w); });
      if (!ran) return Fail("threads wait for others that have ended or wait elsewhere");
    }
    for (size_t i = 0; i < kGuard; ++i) {
      if (base_[shared_bytes_ + i] != static_cast<char>(0xFF)) Fail("write behind shared memory");
    }
  }
  bool AllDone() const {
    return std::all_of(fibers_.begin(), fibers_.end(), [](const Fiber& f) { return f.done; });
  }
  // Runs the threads of a warp that can run, each once. Whether there was one.
  bool RunWarp(size_t warp) {
    std::array<size_t, 32> lanes;
    std::iota(lanes.begin(), lanes.end(), warp * 32);
    std::shuffle(lanes.begin(), lanes.end(), random_);
    bool ran = false;
    for (const size_t i : lanes) {
      const Fiber& fiber = fibers_[i];
      const bool waits = fiber.waits_for != nullptr && *fiber.waits_for == fiber.seen;
      if (fiber.done || waits || !error_.empty()) continue;
      ran = true;
      running_ = i;
      Resume(&fibers_[i]);
    }
    return ran;
  }
  void Start(size_t i) {
    Fiber& fiber = fibers_[i];
    fiber.done = false;
    fiber.waits_for = nullptr;
    fiber.groups = 0;
    fiber.copies.clear();
    fiber.started = false;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStack;
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&fiber.start, reinterpret_cast<void (*)()>(&BlockEmulator::Enter), 2,
                static_cast<unsigned>(self >> 32), static_cast<unsigned>(self));
  }
  static void Enter(unsigned high, unsigned low);
  // setjmp, as swapcontext makes a system call each time.
  void Resume(Fiber* fiber) {
    if (_setjmp(scheduler_) != 0) return;
    if (fiber->started) _longjmp(fiber->at, 1);
    fiber->started = true;
    setcontext(&fiber->start);
  }
  void Yield(Fiber* fiber) {
    if (_setjmp(fiber->at) == 0) _longjmp(scheduler_, 1);
  }
  void Fail(const std::string& what) {
    if (error_.empty()) error_ = "block " + std::to_string(block_) + ": " + what;
  }

  // Returns when all of the meeting have arrived. After an error it never does: the block is over.
  void Meet(Meeting* meeting, Kind kind) {
    if (meeting->arrived == 0) meeting->kind = kind;
    if (meeting->kind != kind) Fail("lanes of a warp are in different operations");
    Fiber& fiber = fibers_[running_];
    if (++meeting->arrived == meeting->expected) {
      if (meeting != &everyone_) Perform(meeting);
      meeting->arrived = 0;
      ++meeting->times;
    } else {
      fiber.waits_for = &meeting->times;
      fiber.seen = meeting->times;
      Yield(&fiber);
      fiber.waits_for = nullptr;
    }
    while (!error_.empty()) Yield(&fiber);
  }

  void Perform(Meeting* warp) {
    switch (warp->kind) {
      case Kind::kShuffle: {
        std::array<float, 32> values;
        for (size_t l = 0; l < 32; ++l) values[l] = warp->lanes[l].value;
        for (size_t l = 0; l < 32; ++l) {
          warp->lanes[l].value = values[l ^ static_cast<size_t>(warp->lanes[l].bits)];
        }
        return;
      }
      case Kind::kLoad:
      case Kind::kLoadTransposed:
        return LoadMatrices(warp, warp->kind == Kind::kLoadTransposed);
      case Kind::kMultiplyBf16:
        return Multiply<Bf16>(warp);
      case Kind::kMultiplyFp16:
        return Multiply<Fp16>(warp);
      default:
        return;
    }
  }
  static uint16_t HalfAt(const char* address) {
    uint16_t half;
    std::memcpy(&half, address, 2);
    return half;
  }
  void LoadMatrices(Meeting* warp, bool transposed) {
    for (size_t matrix = 0; matrix < 4; ++matrix) {
      std::array<int, 8> banks{};
      for (size_t row = 0; row < 8; ++row) {
        const char* address = warp->lanes[matrix * 8 + row].address;
        if (address < base_ || address + 16 > base_ + shared_bytes_)
          return Fail("ldmatrix outside");
        if ((address - base_) % 16 != 0) return Fail("ldmatrix from a misaligned row");
        bank_conflicts_ += banks[static_cast<size_t>((address - base_) / 16 % 8)]++;
      }
      for (size_t l = 0; l < 32; ++l) {
        uint32_t value = 0;
        for (size_t e = 0; e < 2; ++e) {
          const size_t row = transposed ? l % 4 * 2 + e : l / 4;
          const size_t column = transposed ? l / 4 : l % 4 * 2 + e;
          const uint32_t half = HalfAt(warp->lanes[matrix * 8 + row].address + column * 2);
          value |= half << (16 * e);
        }
        warp->lanes[l].registers[matrix] = value;
      }
    }
  }
  template <class T>
  static double ValueOf(uint32_t packed, size_t half) {
    return Element<T>::Widen({static_cast<uint16_t>(packed >> (16 * half))});
  }
  // m16n8k16: "Matrix fragments for mma.m16n8k16 with floating point type".
  template <class T>
  static void Multiply(Meeting* warp) {
    double a[16][16], b[16][8];
    for (size_t l = 0; l < 32; ++l) {
      const size_t group = l / 4, in_group = l % 4;
      for (size_t i = 0; i < 8; ++i) {
        const size_t row = group + (i % 4 < 2 ? 0 : 8);
        const size_t column = in_group * 2 + i % 2 + (i < 4 ? 0 : 8);
        a[row][column] = ValueOf<T>(warp->lanes[l].a[i / 2], i % 2);
      }
      for (size_t i = 0; i < 4; ++i) {
        b[in_group * 2 + i % 2 + (i < 2 ? 0 : 8)][group] =
            ValueOf<T>(warp->lanes[l].b[i / 2], i % 2);
      }
    }
    for (size_t l = 0; l < 32; ++l) {
      for (size_t i = 0; i < 4; ++i) {
        const size_t row = l / 4 + (i < 2 ? 0 : 8), column = l % 4 * 2 + i % 2;
        double sum = warp->lanes[l].c[i];
        for (size_t k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
        warp->lanes[l].c[i] = static_cast<float>(sum);
      }
    }
  }

  void StartCopy(void* to, const void* from, size_t bytes, bool valid) {
    auto* target = static_cast<char*>(to);
    if (target < base_ || target + bytes > base_ + shared_bytes_) return Fail("copy outside");
    if (static_cast<size_t>(target - base_) % bytes != 0 ||
        reinterpret_cast<uintptr_t>(from) % bytes != 0) {
      return Fail("misaligned copy");
    }
    Fiber& fiber = fibers_[running_];
    const Copy copy{target, static_cast<const char*>(from), bytes, valid, fiber.groups};
    if (random_() % 2 == 0) {
      Finish(copy);
    } else {
      fiber.copies.push_back(copy);
    }
  }
  static void Finish(const Copy& copy) {
    std::memset(copy.to, 0, copy.bytes);
    if (copy.valid) std::memcpy(copy.to, copy.from, copy.bytes);
  }
  void WaitCopies(int64_t pending) {
    Fiber& fiber = fibers_[running_];
    std::erase_if(fiber.copies, [&](const Copy& copy) {
      if (copy.group >= fiber.groups - pending) return false;
      Finish(copy);
      return true;
    });
  }

  std::mt19937 random_;
  std::vector<char> shared_;
  char* base_;
  size_t shared_bytes_;
  std::vector<Fiber> fibers_;
  std::vector<Meeting> warps_;
  Meeting everyone_;
  jmp_buf scheduler_;
  size_t running_ = 0;
  const Body* body_ = nullptr;
  int64_t block_ = 0;
  std::string error_;
  int64_t bank_conflicts_ = 0;
};

// As DeviceSimt, which says what each does.
class BlockEmulator::Simt {
 public:
  Simt(BlockEmulator* emulator, size_t thread) : emulator_(emulator), thread_(thread) {}
  int thread() const { return static_cast<int>(thread_); }
  int64_t block() const { return emulator_->block_; }

  void SyncBlock() const { emulator_->Meet(&emulator_->everyone_, Kind::kSync); }
  void SyncWarp() const { emulator_->Meet(warp(), Kind::kSync); }
  float ShuffleXor(float x, int bits) const {
    lane()->value = x;
    lane()->bits = bits;
    emulator_->Meet(warp(), Kind::kShuffle);
    return lane()->value;
  }
  void CopyAsync16(void* shared, const void* global, bool valid) const {
    emulator_->StartCopy(shared, global, 16, valid);
  }
  void CopyAsync4(void* shared, const void* global, bool valid) const {
    emulator_->StartCopy(shared, global, 4, valid);
  }
  void CommitCopies() const { ++emulator_->fibers_[thread_].groups; }
  template <int kPending>
  void WaitCopies() const {
    emulator_->WaitCopies(kPending);
  }
  void LoadMatrices(const void* row, uint32_t (&to)[4]) const { Load(row, to, Kind::kLoad); }
  void LoadMatricesTransposed(const void* row, uint32_t (&to)[4]) const {
    Load(row, to, Kind::kLoadTransposed);
  }
  template <class T>
  void MultiplyAdd(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) const {
    lane()->a = {a[0], a[1], a[2], a[3]};
    lane()->b = {b0, b1};
    lane()->c = c;
    emulator_->Meet(warp(), std::is_same_v<T, Fp16> ? Kind::kMultiplyFp16 : Kind::kMultiplyBf16);
  }
  template <class T>
  uint32_t Pack(float low, float high) const {
    return Element<T>::Narrow(low).bits | uint32_t{Element<T>::Narrow(high).bits} << 16;
  }
  float Exp2(float x) const { return std::exp2(x); }

 private:
  Meeting* warp() const { return &emulator_->warps_[thread_ / 32]; }
  Lane* lane() const { return &warp()->lanes[thread_ % 32]; }
  void Load(const void* row, uint32_t (&to)[4], Kind kind) const {
    lane()->address = static_cast<const char*>(row);
    lane()->registers = to;
    emulator_->Meet(warp(), kind);
  }

  BlockEmulator* emulator_;
  size_t thread_;
};

inline void BlockEmulator::Enter(unsigned high, unsigned low) {
  auto* self = reinterpret_cast<BlockEmulator*>(uintptr_t{high} << 32 | low);
  const size_t thread = self->running_;
  (*self->body_)(Simt(self, thread), self->base_);
  self->fibers_[thread].done = true;
  _longjmp(self->scheduler_, 1);
}

}  // namespace zeroshard::cuda
