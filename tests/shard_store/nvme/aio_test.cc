#include "shard_store/nvme/aio.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "tests/common/temp_folder.h"
#include "tests/shard_store/nvme/disk_faults.h"

namespace zeroshard::nvme {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Verdict = DiskHook::Verdict;

constexpr uint32_t kBytes = 64 * 1024;

class AioTest : public OverEngines {
 protected:
  void SetUp() override { Start({}); }
  void Start(AsyncIoOptions options) {
    io_.reset();
    pool_.reset();
    Open(8, options);
    if (io_ == nullptr) return;
    pool_ = Pool(8);
    if (file_ != nullptr) return;
    auto file = DirectFile::Create(folder_ / "file", &faults_);
    ASSERT_TRUE(file.ok()) << file.status();
    file_ = *file;
    RecordProperty("direct", file_->direct() ? "yes" : "no");
    ASSERT_TRUE(file_->Allocate(16 * kBytes).ok());
  }
  absl::Status Write(uint64_t offset, const std::vector<char>& bytes) {
    return WriteNow(io_.get(), file_, offset, bytes, pool_.get());
  }
  absl::StatusOr<std::vector<char>> Read(uint64_t offset, uint32_t bytes = kBytes) {
    return ReadNow(io_.get(), file_, offset, bytes, pool_.get());
  }

  TempFolder folder_;
  std::shared_ptr<DirectFile> file_;
  std::shared_ptr<BufferPool> pool_;
};

INSTANTIATE_TEST_SUITE_P(Engines, AioTest, ::testing::Values(Engine::kRing, Engine::kThreads),
                         EngineName);

TEST_P(AioTest, WhatIsWrittenIsReadAgain) {
  const std::vector<char> first = Bytes(kBytes, 1), second = Bytes(4096, 2);
  ASSERT_TRUE(Write(0, first).ok());
  ASSERT_TRUE(Write(kBytes, second).ok());
  auto seen = Read(0);
  ASSERT_TRUE(seen.ok()) << seen.status();
  EXPECT_EQ(*seen, first);
  seen = Read(kBytes, 4096);
  ASSERT_TRUE(seen.ok()) << seen.status();
  EXPECT_EQ(*seen, second);
  EXPECT_EQ(pool_->free(), 8);
}

TEST_P(AioTest, ShortAnswersGoOnWhereTheyEnded) {
  const std::vector<char> bytes = Bytes(kBytes, 3);
  int attempts = 0;
  // Also lengths between blocks: what O_DIRECT cannot go on from is done again.
  faults_.Set([&](const DiskHook::Attempt& attempt) {
    ++attempts;
    EXPECT_EQ(attempt.offset % kAlignment, 0u);
    return attempts % 3 == 0 ? AtMost(4096) : AtMost(12288);
  });
  ASSERT_TRUE(Write(4096, bytes).ok());
  EXPECT_GE(attempts, 6);
  const auto seen = Read(4096);
  ASSERT_TRUE(seen.ok()) << seen.status();
  EXPECT_EQ(*seen, bytes);
}

TEST_P(AioTest, AnAnswerBetweenBlocksIsDoneAgainFromTheBlock) {
  const std::vector<char> bytes = Bytes(kBytes, 4);
  int attempts = 0;
  std::vector<uint64_t> offsets;
  faults_.Set([&](const DiskHook::Attempt& attempt) {
    offsets.push_back(attempt.offset);
    return ++attempts == 1 ? Answer(5000) : Verdict{};
  });
  // The first 4096 bytes count as written though nothing was: the test looks at where it goes on.
  ASSERT_TRUE(Write(0, bytes).ok());
  EXPECT_EQ(offsets, (std::vector<uint64_t>{0, 4096}));
}

TEST_P(AioTest, InterruptedAndBusyAreTriedAgain) {
  const std::vector<char> bytes = Bytes(kBytes, 5);
  int attempts = 0;
  faults_.Set([&](const DiskHook::Attempt&) {
    ++attempts;
    if (attempts == 1) return Answer(-EINTR);
    if (attempts <= 4) return Answer(-EAGAIN);
    return Verdict{};
  });
  ASSERT_TRUE(Write(0, bytes).ok());
  EXPECT_EQ(attempts, 5);
  const auto seen = Read(0);
  ASSERT_TRUE(seen.ok());
  EXPECT_EQ(*seen, bytes);
}

TEST_P(AioTest, AnErrorNamesPathOffsetBytesAndReason) {
  faults_.Set([](const DiskHook::Attempt& attempt) {
    return attempt.offset == 8192 ? Answer(-EIO) : Verdict{};
  });
  EXPECT_TRUE(Write(0, Bytes(4096, 6)).ok());
  const absl::Status status = Write(8192, Bytes(4096, 6));
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(folder_ / "file"), HasSubstr("write 4096 bytes at 8192"),
                    HasSubstr(strerror(EIO))));
  EXPECT_TRUE(Write(0, Bytes(4096, 6)).ok()) << "one error ends nothing else";
  EXPECT_EQ(pool_->free(), 8);
}

TEST_P(AioTest, BytesAndErrorsAreCounted) {
  IoCounters counters;
  AsyncIoOptions options;
  options.counters = &counters;
  Start(options);
  if (io_ == nullptr) return;
  ASSERT_TRUE(Write(0, Bytes(kBytes, 6)).ok());
  ASSERT_TRUE(Read(4096, 8192).ok());
  EXPECT_EQ(counters.written_bytes, kBytes);
  EXPECT_EQ(counters.read_bytes, 8192u);
  EXPECT_EQ(counters.errors, 0u);
  // Of a write that fails half way, what was written.
  faults_.Set([](const DiskHook::Attempt& attempt) {
    return attempt.offset == 8192 ? Answer(-EIO) : AtMost(8192);
  });
  EXPECT_FALSE(Write(0, Bytes(kBytes, 6)).ok());
  EXPECT_EQ(counters.written_bytes, kBytes + 8192u);
  EXPECT_EQ(counters.errors, 1u);
  io_.reset();  // before what it counts with
}

TEST_P(AioTest, ADeviceThatIsFullIsResourceExhausted) {
  faults_.Set([](const DiskHook::Attempt&) { return Answer(-ENOSPC); });
  EXPECT_TRUE(absl::IsResourceExhausted(Write(0, Bytes(4096, 6))));
}

TEST_P(AioTest, ReadingPastTheEndIsDataLoss) {
  ASSERT_EQ(ftruncate(file_->fd(), kBytes / 2), 0);
  const auto seen = Read(0);
  EXPECT_TRUE(absl::IsDataLoss(seen.status())) << seen.status();
  EXPECT_THAT(std::string(seen.status().message()), HasSubstr("the file ends at 32768"));
}

TEST_P(AioTest, AWriteThatNeverGetsOnEnds) {
  for (const int64_t each : {0, 512}) {  // bytes, less than what a write can go on at
    int attempts = 0;
    faults_.Set([&](const DiskHook::Attempt&) {
      ++attempts;
      return Answer(each);
    });
    // As another I/O error; not UNAVAILABLE, which says that it may come right by itself.
    EXPECT_EQ(Write(0, Bytes(4096, 1)).code(), absl::StatusCode::kUnknown);
    EXPECT_GT(attempts, 1);
  }
}

TEST_P(AioTest, UnalignedOrTooLongIsRefused) {
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, uint32_t>>{
           {1, 4096}, {0, 4095}, {0, 0}, {0, kBufferBytes + 4096}, {UINT64_MAX - 4095, 4096}}) {
    WaitGroup group;
    io_->Write(file_, offset, bytes, pool_->TryTake(), group.Add());
    EXPECT_TRUE(absl::IsInvalidArgument(group.Wait())) << offset << " " << bytes;
  }
  EXPECT_EQ(pool_->free(), 8);
}

TEST_P(AioTest, ADeviceThatDoesNotAnswerIsReportedAndNothingWaitsForItAfterwards) {
  AsyncIoOptions options;
  options.stall_limit = absl::Milliseconds(50);
  options.depth = 2;
  Start(options);
  if (io_ == nullptr) return;
  faults_.Set([](const DiskHook::Attempt&) {
    Verdict verdict;
    verdict.what = Verdict::kHang;
    return verdict;
  });
  std::vector<absl::Status> seen(4);
  {
    WaitGroup group;
    for (int i = 0; i < 4; ++i) {
      io_->Read(file_, 4096, 4096, pool_->TryTake(),
                [&seen, i, ended = group.Add()](absl::Status status, IoBuffer) {
                  seen[i] = status;
                  ended(std::move(status), IoBuffer());
                });
    }
  }
  for (const absl::Status& status : seen) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("50ms"), HasSubstr("4096 of " + (folder_ / "file"))));
  }
  faults_.Set({});
  EXPECT_TRUE(absl::IsDeadlineExceeded(Read(0).status())) << "a hung device is not tried again";
}

// Holds one operation in the kernel's hands, or in what stands for them, until End.
class Stuck {
 public:
  // Over io_uring the file becomes a pipe that nobody writes to; over threads the call hangs.
  Stuck(Engine engine, const DirectFile& file, DiskFaults* faults) {
    if (engine == Engine::kRing) {
      EXPECT_EQ(pipe2(pipe_, O_CLOEXEC), 0);
      EXPECT_GE(dup2(pipe_[0], file.fd()), 0);
      return;
    }
    faults->Set([this](const DiskHook::Attempt&) {
      std::unique_lock<std::mutex> lock(mutex_);
      ended_.wait(lock, [this] { return over_; });
      return Verdict{};
    });
  }
  ~Stuck() {
    for (const int fd : pipe_) {
      if (fd >= 0) close(fd);
    }
  }
  void End() {
    if (pipe_[1] >= 0) {
      EXPECT_EQ(write(pipe_[1], std::string(4096, 'x').data(), 4096), 4096);
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    ended_.notify_all();
  }

 private:
  int pipe_[2] = {-1, -1};
  std::mutex mutex_;
  std::condition_variable ended_;
  bool over_ = false;
};

TEST_P(AioTest, TheBufferOfAHungOperationComesBackWhenTheKernelLetsGoOfIt) {
  AsyncIoOptions options;
  options.stall_limit = absl::Milliseconds(30);
  Start(options);
  if (io_ == nullptr) return;
  Stuck stuck(GetParam(), *file_, &faults_);
  EXPECT_TRUE(absl::IsDeadlineExceeded(Read(0, 4096).status()));
  std::vector<IoBuffer> others;
  while (IoBuffer buffer = pool_->TryTake()) others.push_back(std::move(buffer));
  EXPECT_EQ(others.size(), 7u);
  stuck.End();
  EXPECT_TRUE(pool_->Take(absl::Seconds(20)).ok());
}

TEST_P(AioTest, AQueueWithAHungOperationCanBeClosed) {
  AsyncIoOptions options;
  options.stall_limit = absl::Milliseconds(30);
  Start(options);
  if (io_ == nullptr) return;
  Stuck stuck(GetParam(), *file_, &faults_);
  EXPECT_TRUE(absl::IsDeadlineExceeded(Read(0, 4096).status()));
  io_.reset();
  EXPECT_EQ(pool_->free(), 7);
  stuck.End();
  if (GetParam() == Engine::kThreads) {  // its thread is still there, and must be gone before this
    std::vector<IoBuffer> all;
    for (int i = 0; i < 8; ++i) {
      auto buffer = pool_->Take(absl::Seconds(20));
      ASSERT_TRUE(buffer.ok());
      all.push_back(*std::move(buffer));
    }
  }
}

TEST_P(AioTest, MoreThanTheDepthFromSeveralThreadsAllEnd) {
  AsyncIoOptions options;
  options.depth = 2;
  Start(options);
  if (io_ == nullptr) return;
  std::vector<std::thread> threads;
  std::vector<absl::Status> statuses(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 25 && statuses[t].ok(); ++i) {
        const std::vector<char> bytes = Bytes(4096, static_cast<uint32_t>(t * 100 + i));
        const uint64_t offset = static_cast<uint64_t>(t) * 4096;
        statuses[t] = Write(offset, bytes);
        if (!statuses[t].ok()) return;
        const auto seen = Read(offset, 4096);
        statuses[t] = seen.status();
        if (seen.ok() && *seen != bytes) statuses[t] = absl::DataLossError("other bytes");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

TEST_P(AioTest, ACallbackMayStartTheNext) {
  WaitGroup group;
  const AsyncIo::Done ended = group.Add();
  int left = 20;
  std::function<void(absl::Status, IoBuffer)> next = [&](absl::Status status, IoBuffer buffer) {
    if (!status.ok() || --left == 0) return ended(std::move(status), std::move(buffer));
    io_->Write(file_, static_cast<uint64_t>(left % 4) * 4096, 4096, std::move(buffer), next);
  };
  io_->Write(file_, 0, 4096, pool_->TryTake(), next);
  EXPECT_TRUE(group.Wait().ok());
  EXPECT_EQ(left, 0);
}

TEST_P(AioTest, WhatWasStartedEndsBeforeTheQueueIsGone) {
  std::atomic<int> ended = 0;
  for (int i = 0; i < 8; ++i) {
    io_->Write(file_, static_cast<uint64_t>(i) * kBytes, kBytes, pool_->TryTake(),
               [&](absl::Status status, IoBuffer) { ended += status.ok() ? 1 : 100; });
  }
  io_.reset();
  EXPECT_EQ(ended, 8);
}

TEST_P(AioTest, BuffersOfAnotherArenaWorkToo) {
  auto other = BufferArena::Create(1, 8192);
  ASSERT_TRUE(other.ok());
  auto pool = BufferPool::Create(*other, 1);
  ASSERT_TRUE(pool.ok());
  const std::vector<char> bytes = Bytes(8192, 9);
  ASSERT_TRUE(WriteNow(io_.get(), file_, 0, bytes, pool->get()).ok());
  const auto seen = Read(0, 8192);
  ASSERT_TRUE(seen.ok());
  EXPECT_EQ(*seen, bytes);
}

TEST_P(AioTest, WithoutRegisteredBuffersItWorksToo) {
  faults_.register_buffers = ENOMEM;
  Start({});
  if (io_ == nullptr) return;
  const std::vector<char> bytes = Bytes(kBytes, 10);
  ASSERT_TRUE(Write(0, bytes).ok());
  const auto seen = Read(0);
  ASSERT_TRUE(seen.ok());
  EXPECT_EQ(*seen, bytes);
}

TEST(AioFallback, RefusedRingsAreReplacedByThreadsUnlessARingWasAskedFor) {
  for (const int error : {ENOSYS, EPERM, EACCES}) {
    DiskFaults faults;
    faults.ring_setup = error;
    AsyncIoOptions options;
    options.hook = &faults;
    const auto any = AsyncIo::Create(options, nullptr);
    ASSERT_TRUE(any.ok()) << any.status();
    EXPECT_STREQ((*any)->engine(), "threads");
    options.engine = Engine::kRing;
    EXPECT_TRUE(absl::IsUnavailable(AsyncIo::Create(options, nullptr).status()));
  }
}

TEST(AioFallback, OtherErrorsOfTheRingAreNotHidden) {
  DiskFaults faults;
  faults.ring_setup = EMFILE;
  AsyncIoOptions options;
  options.hook = &faults;
  EXPECT_FALSE(AsyncIo::Create(options, nullptr).ok());
}

TEST(AioOptions, WithoutAThreadMoreThereIsNoQueueAndNothingIsLeftOfIt) {
  for (const Engine engine : {Engine::kRing, Engine::kThreads}) {
    for (const int most : {0, 1, 3}) {
      if (engine == Engine::kRing && most != 0) continue;  // it has one
      AsyncIoOptions options;
      options.engine = engine;
      options.threads = 3;  // and one for the time
      int started = 0;
      options.start_thread = [&](std::function<void()> run) {
        if (started == most) throw std::system_error(EAGAIN, std::generic_category());
        ++started;
        return std::thread(std::move(run));
      };
      const auto io = AsyncIo::Create(options, nullptr);
      if (absl::IsUnavailable(io.status())) continue;  // no io_uring here
      EXPECT_TRUE(absl::IsResourceExhausted(io.status())) << io.status();
      EXPECT_EQ(started, most);
    }
  }
}

TEST(AioOptions, NonsenseIsRefused) {
  AsyncIoOptions options;
  options.depth = 0;
  EXPECT_TRUE(absl::IsInvalidArgument(AsyncIo::Create(options, nullptr).status()));
  options.depth = 1;
  options.stall_limit = absl::ZeroDuration();
  EXPECT_TRUE(absl::IsInvalidArgument(AsyncIo::Create(options, nullptr).status()));
}

TEST(Buffers, AreAlignedAndCountAgainstTheBudget) {
  uint64_t taken = 0;
  {
    const auto arena = BufferArena::Create(3, 8192,
                                           {[&](uint64_t bytes) {
                                              taken += bytes;
                                              return absl::OkStatus();
                                            },
                                            [&](uint64_t bytes) { taken -= bytes; }});
    ASSERT_TRUE(arena.ok());
    EXPECT_EQ(taken, 3 * 8192u);
    const auto pool = BufferPool::Create(*arena, 2);
    ASSERT_TRUE(pool.ok());
    EXPECT_EQ((*arena)->free(), 1);
    EXPECT_TRUE(absl::IsResourceExhausted(BufferPool::Create(*arena, 2).status()));
    const IoBuffer first = (*pool)->TryTake(), second = (*pool)->TryTake();
    ASSERT_TRUE(first && second);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first.data()) % kAlignment, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(second.data()) % kAlignment, 0u);
    EXPECT_FALSE((*pool)->TryTake());
    EXPECT_TRUE(absl::IsDeadlineExceeded((*pool)->Take(absl::Milliseconds(1)).status()));
  }
  EXPECT_EQ(taken, 0u);
  const auto refused = BufferArena::Create(
      1, 4096, {[](uint64_t) { return absl::ResourceExhaustedError("full"); }, nullptr});
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status()));
}

TEST(Buffers, OutliveTheirPool) {
  auto arena = BufferArena::Create(1, 4096);
  ASSERT_TRUE(arena.ok());
  IoBuffer buffer = (*BufferPool::Create(*arena, 1))->TryTake();
  arena = absl::UnknownError("given up");
  buffer.data()[4095] = 1;
  buffer.Reset();
  EXPECT_FALSE(buffer);
}

TEST(DirectFile, WithoutDirectAccessTheFileIsOpenedAllTheSame) {
  TempFolder folder;
  DiskFaults faults;
  faults.open = [](const std::string&, int flags) { return flags & O_DIRECT ? EINVAL : 0; };
  const auto file = DirectFile::Create(folder / "file", &faults);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_FALSE((*file)->direct());
}

TEST(DirectFile, IsNeverOneThatIsThere) {
  TempFolder folder;
  ASSERT_TRUE(DirectFile::Create(folder / "file").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(DirectFile::Create(folder / "file").status()));
}

}  // namespace
}  // namespace zeroshard::nvme
