// What the tests of the NVMe tier share: engines to run over, and disks that fail as they are told.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "shard_store/nvme/aio.h"
#include "shard_store/nvme/chunk_file.h"
#include "shard_store/nvme/wait_group.h"

namespace zeroshard::nvme {

using Engine = AsyncIoOptions::Engine;

// Programs are called under a lock, one at a time.
class DiskFaults : public DiskHook {
 public:
  std::function<Verdict(const Attempt&)> operation;
  std::function<int(const std::string& path, int flags)> open;
  std::function<int(uint64_t bytes)> allocate;
  int ring_setup = 0, register_buffers = 0;

  Verdict OnOperation(const Attempt& attempt) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return operation ? operation(attempt) : Verdict{};
  }
  int OnOpen(const std::string& path, int flags) override { return open ? open(path, flags) : 0; }
  int OnAllocate(const std::string&, uint64_t bytes) override {
    return allocate ? allocate(bytes) : 0;
  }
  int OnRingSetup() override { return ring_setup; }
  int OnRegisterBuffers() override { return register_buffers; }

  void Set(std::function<Verdict(const Attempt&)> next) {
    std::lock_guard<std::mutex> lock(mutex_);
    operation = std::move(next);
  }

 private:
  std::mutex mutex_;
};

inline DiskHook::Verdict Answer(int64_t result) {
  DiskHook::Verdict verdict;
  verdict.what = DiskHook::Verdict::kPretend;
  verdict.result = result;
  return verdict;
}

inline DiskHook::Verdict AtMost(uint32_t bytes) {
  DiskHook::Verdict verdict;
  verdict.bytes = bytes;
  return verdict;
}

inline std::string EngineName(const ::testing::TestParamInfo<Engine>& info) {
  return info.param == Engine::kRing ? "io_uring" : "threads";
}

// A queue over the engine of the test, or none where the system has no io_uring: then the test is
// skipped. Buffers of kBufferBytes.
class OverEngines : public ::testing::TestWithParam<Engine> {
 protected:
  void Open(int buffers, AsyncIoOptions options = {}) {
    auto arena = BufferArena::Create(buffers, kBufferBytes);
    ASSERT_TRUE(arena.ok()) << arena.status();
    arena_ = *arena;
    options.engine = GetParam();
    options.hook = &faults_;
    auto io = AsyncIo::Create(options, arena_);
    if (absl::IsUnavailable(io.status())) GTEST_SKIP() << io.status();
    ASSERT_TRUE(io.ok()) << io.status();
    io_ = *std::move(io);
    RecordProperty("engine", io_->engine());
  }
  std::shared_ptr<BufferPool> Pool(int buffers) {
    auto pool = BufferPool::Create(arena_, buffers);
    EXPECT_TRUE(pool.ok()) << pool.status();
    return pool.ok() ? *pool : nullptr;
  }

  DiskFaults faults_;
  std::shared_ptr<BufferArena> arena_;
  std::unique_ptr<AsyncIo> io_;
};

inline std::vector<char> Bytes(size_t count, uint32_t seed) {
  std::vector<char> bytes(count);
  for (char& byte : bytes) {
    seed = seed * 1664525 + 1013904223;
    byte = static_cast<char>(seed >> 24);
  }
  return bytes;
}

// One operation, waited for.
inline absl::Status WriteNow(AsyncIo* io, const std::shared_ptr<DirectFile>& file, uint64_t offset,
                             const std::vector<char>& bytes, BufferPool* pool) {
  IoBuffer buffer = pool->TryTake();
  std::memcpy(buffer.data(), bytes.data(), bytes.size());
  WaitGroup group;
  io->Write(file, offset, static_cast<uint32_t>(bytes.size()), std::move(buffer), group.Add());
  return group.Wait();
}

inline absl::StatusOr<std::vector<char>> ReadNow(AsyncIo* io,
                                                 const std::shared_ptr<DirectFile>& file,
                                                 uint64_t offset, uint32_t bytes,
                                                 BufferPool* pool) {
  WaitGroup group;
  std::vector<char> seen;
  io->Read(file, offset, bytes, pool->TryTake(),
           [&seen, bytes, ended = group.Add()](absl::Status status, IoBuffer buffer) {
             if (status.ok()) seen.assign(buffer.data(), buffer.data() + bytes);
             ended(std::move(status), std::move(buffer));
           });
  const absl::Status status = group.Wait();
  if (!status.ok()) return status;
  return seen;
}

}  // namespace zeroshard::nvme
