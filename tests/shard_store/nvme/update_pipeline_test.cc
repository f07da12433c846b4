#include "shard_store/nvme/update_pipeline.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <thread>

#include "common/kernels/adamw.h"
#include "tests/common/temp_folder.h"
#include "tests/shard_store/nvme/disk_faults.h"

namespace zeroshard::nvme {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using Verdict = DiskHook::Verdict;

// Threads that compute, as the store has them.
class Threads {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; ++i) {
      threads_.emplace_back([this] {
        while (true) {
          std::function<void()> task;
          {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [this] { return ending_ || !tasks_.empty(); });
            if (tasks_.empty()) return;
            task = std::move(tasks_.front());
            tasks_.pop_front();
          }
          task();
        }
      });
    }
  }
  ~Threads() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  void Add(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

// A job of three trained chunks (a whole block and a bit, one element, a few) with bf16 gradients
// and parameters, beside the same in memory.
class UpdateTest : public OverEngines {
 protected:
  static constexpr int64_t kSizes[] = {kBlockElements + 77, 1, 5000};

  void SetUp() override {
    Open(40);
    if (io_ == nullptr) return;
    pool_ = Pool(8);
    Make(2);
  }
  void TearDown() override {
    file_.reset();
    io_.reset();
  }

  void Make(int spare_slots, bool fp32 = false) {
    fp32_ = fp32;
    ChunkFileOptions options;
    options.dir = folder_.path();
    options.run_id = "run";
    options.io = io_.get();
    options.hook = &faults_;
    options.spare_slots = spare_slots;
    const uint64_t wire = fp32 ? 4 : 2;
    state_.clear();
    for (uint32_t i = 0; i < 3; ++i) {
      const uint64_t n = static_cast<uint64_t>(kSizes[i]);
      options.chunks[i] = {kSizes[i], {4 * n, 4 * n, 4 * n, fp32 ? 0 : 2 * n, wire * n}};
      InMemory& memory = state_.emplace_back();
      memory.master = Values(n, 1 + i);
      memory.exp_avg = Values(n, 10 + i);
      memory.exp_avg_sq = Values(n, 20 + i);
      for (float& value : memory.exp_avg_sq) value *= value;
      memory.parameters.resize(n);
    }
    file_.reset();
    auto file = ChunkFile::Create(options);
    ASSERT_TRUE(file.ok()) << file.status();
    file_ = *file;
    for (uint32_t i = 0; i < 3; ++i) {
      ASSERT_TRUE(Write(i, kMaster, 0, state_[i].master).ok());
      ASSERT_TRUE(Write(i, kExpAvg, 0, state_[i].exp_avg).ok());
      ASSERT_TRUE(Write(i, kExpAvgSq, 0, state_[i].exp_avg_sq).ok());
    }
  }

  static std::vector<float> Values(size_t n, uint32_t seed) {
    std::vector<float> values(n);
    for (float& value : values) {
      seed = seed * 1664525 + 1013904223;
      value = static_cast<float>(static_cast<int32_t>(seed)) * 1e-10f;
    }
    return values;
  }
  template <typename T>
  absl::Status Write(uint32_t chunk, Section section, uint64_t version,
                     const std::vector<T>& data) {
    return file_->WriteSection(
        chunk, section, version,
        {reinterpret_cast<const char*>(data.data()), data.size() * sizeof(T)}, pool_.get());
  }
  template <typename T>
  std::vector<T> Read(uint32_t chunk, Section section, uint64_t version) {
    std::vector<T> data(static_cast<size_t>(kSizes[chunk]));
    const absl::Status status = file_->ReadRange(
        chunk, section, version, 0, {reinterpret_cast<char*>(data.data()), data.size() * sizeof(T)},
        pool_.get());
    EXPECT_TRUE(status.ok()) << status;
    return data;
  }

  AdamWArgs Args(uint64_t version) const {
    AdamWArgs args;
    args.learning_rate = 0.01f;
    args.weight_decay = 0.1f;
    args.t = static_cast<int64_t>(version);
    return args;
  }
  DType Wire() const { return fp32_ ? DType::kF32 : DType::kBF16; }

  // Gradients for `version` to the file, and the step in memory.
  void Stage(uint64_t version) {
    for (uint32_t i = 0; i < 3; ++i) {
      InMemory& memory = state_[i];
      const size_t n = memory.master.size();
      std::vector<float> gradient = Values(n, static_cast<uint32_t>(version) * 50 + i);
      std::vector<uint16_t> half(n);
      for (size_t k = 0; k < n; ++k) {  // any bf16 with a small exponent will do
        uint32_t bits;
        std::memcpy(&bits, &gradient[k], 4);
        half[k] = static_cast<uint16_t>(bits >> 16);
      }
      ASSERT_TRUE(
          (fp32_ ? Write(i, kStaging, version, gradient) : Write(i, kStaging, version, half)).ok());
      cpu::AdamW(Args(version), static_cast<int64_t>(n),
                 fp32_ ? static_cast<const void*>(gradient.data()) : half.data(), Wire(),
                 memory.master.data(), memory.exp_avg.data(), memory.exp_avg_sq.data(),
                 fp32_ ? static_cast<void*>(memory.master.data()) : memory.parameters.data(),
                 Wire(), 1);
    }
  }

  UpdateOptions Options(uint64_t version, const std::shared_ptr<BufferPool>& pool) {
    UpdateOptions options;
    options.file = file_;
    options.pool = pool;
    options.chunks = {0, 1, 2};
    options.from_version = version - 1;
    options.to_version = version;
    options.execute = [this](std::function<void()> task) { threads_.Add(std::move(task)); };
    options.compute = [this, version](const UpdateRow& row) {
      cpu::AdamW(Args(version), row.end - row.begin, row.gradient, Wire(), row.master, row.exp_avg,
                 row.exp_avg_sq, fp32_ ? row.master : row.parameters, Wire(), 1);
      return absl::OkStatus();
    };
    options.on_chunk = [this](uint32_t chunk) {
      std::lock_guard<std::mutex> lock(mutex_);
      updated_.push_back(chunk);
    };
    return options;
  }
  // Runs it to its end.
  absl::Status Run(UpdateOptions options) {
    updated_.clear();
    absl::Status result = absl::UnknownError("done was not called");
    WaitGroup group;
    options.done = [&result, ended = group.Add()](const absl::Status& status) {
      result = status;
      ended(absl::OkStatus(), IoBuffer());
    };
    const auto done = options.done;
    if (const absl::Status started = StartUpdate(std::move(options)); !started.ok()) done(started);
    (void)group.Wait();
    return result;
  }
  void ExpectAsInMemory(uint64_t version) {
    for (uint32_t i = 0; i < 3; ++i) {
      EXPECT_EQ(Read<float>(i, kMaster, version), state_[i].master);
      EXPECT_EQ(Read<float>(i, kExpAvg, version), state_[i].exp_avg);
      EXPECT_EQ(Read<float>(i, kExpAvgSq, version), state_[i].exp_avg_sq);
      if (!fp32_) {
        EXPECT_EQ(Read<uint16_t>(i, kParameters, version), state_[i].parameters);
      }
    }
  }

  struct InMemory {
    std::vector<float> master, exp_avg, exp_avg_sq;
    std::vector<uint16_t> parameters;
  };
  TempFolder folder_;
  bool fp32_ = false;
  std::shared_ptr<BufferPool> pool_;
  std::shared_ptr<ChunkFile> file_;
  std::vector<InMemory> state_;
  std::mutex mutex_;
  std::vector<uint32_t> updated_;
  Threads threads_{3};
};

INSTANTIATE_TEST_SUITE_P(Engines, UpdateTest, ::testing::Values(Engine::kRing, Engine::kThreads),
                         EngineName);

TEST_P(UpdateTest, StepsHaveTheBitsOfTheWholeVectorInMemory) {
  for (const bool fp32 : {false, true}) {
    Make(0, fp32);
    const auto pool = Pool(kLeastRows * kBuffersPerRow);
    for (uint64_t version = 1; version <= 3; ++version) {
      Stage(version);
      const absl::Status status = Run(Options(version, pool));
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_THAT(updated_, UnorderedElementsAre(0, 1, 2));
      EXPECT_EQ(pool->free(), pool->size()) << "nothing is on its way after done";
    }
    ExpectAsInMemory(3);
  }
}

TEST_P(UpdateTest, AfterDoneTheFileIsItsOwnersAlone) {
  Stage(1);
  UpdateOptions options = Options(1, Pool(10));
  const std::string path = file_->path();
  ASSERT_TRUE(Run(std::move(options)).ok());
  file_.reset();
  EXPECT_NE(access(path.c_str(), F_OK), 0);
}

TEST_P(UpdateTest, AChunkIsReadableWhenItIsToldOf) {
  Stage(1);
  const auto pool = Pool(20);
  UpdateOptions options = Options(1, pool);
  std::vector<absl::Status> seen;
  options.on_chunk = [&](uint32_t chunk) {
    std::vector<char> bytes(2);
    const absl::Status status =
        file_->ReadRange(chunk, kParameters, 1, 0, absl::MakeSpan(bytes), pool_.get());
    std::lock_guard<std::mutex> lock(mutex_);
    seen.push_back(status);
  };
  ASSERT_TRUE(Run(options).ok());
  EXPECT_EQ(seen.size(), 3u);
  for (const absl::Status& status : seen) EXPECT_TRUE(status.ok()) << status;
}

TEST_P(UpdateTest, ASnapshotReadsItsVersionAfterTheNextSteps) {
  const auto pool = Pool(20);
  Make(3);
  const std::vector<InMemory> before = state_;
  ASSERT_TRUE(file_->Preserve().ok());
  for (uint64_t version = 1; version <= 2; ++version) {
    Stage(version);
    ASSERT_TRUE(Run(Options(version, pool)).ok());
  }
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(Read<float>(i, kMaster, ChunkFile::Preserved(1)), before[i].master);
    EXPECT_EQ(Read<float>(i, kExpAvgSq, ChunkFile::Preserved(1)), before[i].exp_avg_sq);
  }
  file_->ReleaseAll(1);
  ExpectAsInMemory(2);
  Stage(3);
  ASSERT_TRUE(Run(Options(3, pool)).ok());
  ExpectAsInMemory(3);
  EXPECT_EQ(file_->free_spare_slots(), 3);
}

TEST_P(UpdateTest, WithoutSpareSlotsAnUpdateGoesOnAsTheSnapshotIsWritten) {
  Make(0);
  const auto pool = Pool(10);
  Stage(1);
  ASSERT_TRUE(file_->Preserve().ok());
  const std::vector<float> first = Read<float>(0, kMaster, 0);
  UpdateOptions options = Options(1, pool);
  WaitGroup group;
  absl::Status result = absl::UnknownError("not done");
  bool over = false;
  options.done = [&, ended = group.Add()](const absl::Status& status) {
    result = status;
    over = true;
    ended(absl::OkStatus(), IoBuffer());
  };
  ASSERT_TRUE(StartUpdate(options).ok());
  EXPECT_EQ(pool->free(), pool->size()) << "it holds no buffers while it waits";
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_FALSE(over);
    EXPECT_EQ(Read<float>(i, kMaster, ChunkFile::Preserved(1)), Read<float>(i, kMaster, 0));
    file_->Release(i, 1);
  }
  (void)group.Wait();
  ASSERT_TRUE(result.ok()) << result;
  file_->ReleaseAll(1);
  ExpectAsInMemory(1);
}

TEST_P(UpdateTest, AnyFailingOperationEndsItWithThatError) {
  const auto pool = Pool(10);
  int operations = 0;
  for (int failing = 1;; ++failing) {
    faults_.Set({});
    Make(0);
    Stage(1);
    operations = 0;
    faults_.Set([&](const DiskHook::Attempt&) {
      return ++operations == failing ? Answer(-EIO) : Verdict{};
    });
    const absl::Status status = Run(Options(1, pool));
    EXPECT_EQ(pool->free(), pool->size());
    if (operations < failing) {
      EXPECT_TRUE(status.ok()) << status;
      break;
    }
    EXPECT_THAT(std::string(status.message()), HasSubstr(strerror(EIO))) << failing;
    faults_.Set({});
    for (const uint32_t chunk : updated_) {
      EXPECT_EQ(Read<float>(chunk, kMaster, 1), state_[chunk].master) << "told of: whole";
    }
  }
  EXPECT_EQ(operations, 4 * 8) << "4 blocks are read and 4 written in each of 4 rows";
}

TEST_P(UpdateTest, DamagedStateIsNeverComputedOn) {
  for (const Section section : {kStaging, kMaster, kExpAvg, kExpAvgSq}) {
    Make(0);
    Stage(1);
    const int fd = open(file_->path().c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    const off_t at = static_cast<off_t>(file_->layout().Find(2)->home.section[section]) + 100;
    char byte = 0;
    ASSERT_EQ(pread(fd, &byte, 1, at), 1);
    byte = static_cast<char>(byte ^ 0x40);
    ASSERT_EQ(pwrite(fd, &byte, 1, at), 1);
    ASSERT_EQ(fdatasync(fd), 0);
    close(fd);
    const auto pool = Pool(10);
    UpdateOptions options = Options(1, pool);
    std::atomic<bool> computed = false;
    options.compute = [&, compute = options.compute](const UpdateRow& row) {
      if (row.chunk == 2) computed = true;
      return compute(row);
    };
    const absl::Status status = Run(options);
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(std::string("chunk 2 ") + NameOf(section)));
    EXPECT_FALSE(computed);
  }
}

TEST_P(UpdateTest, AnErrorOfTheComputationIsTheResult) {
  Stage(1);
  UpdateOptions options = Options(1, Pool(10));
  options.compute = [](const UpdateRow&) { return absl::InternalError("no"); };
  EXPECT_EQ(Run(options), absl::InternalError("no"));
  EXPECT_TRUE(updated_.empty());
}

TEST_P(UpdateTest, GradientsOfAnotherStepAreNotApplied) {
  Stage(1);
  UpdateOptions options = Options(2, Pool(10));
  options.from_version = 0;
  EXPECT_TRUE(absl::IsFailedPrecondition(Run(options)));
}

TEST_P(UpdateTest, NoChunksAreDoneAtOnce) {
  UpdateOptions options = Options(1, Pool(10));
  options.chunks.clear();
  EXPECT_TRUE(Run(options).ok());
}

TEST_P(UpdateTest, NonsenseIsRefused) {
  UpdateOptions options = Options(1, Pool(10));
  options.chunks = {0, 0};
  EXPECT_TRUE(absl::IsInvalidArgument(Run(options)));
  options.chunks = {3};
  EXPECT_TRUE(absl::IsInvalidArgument(Run(options)));
  options.chunks = {0};
  options.pool = Pool(9);
  EXPECT_TRUE(absl::IsInvalidArgument(Run(options)));
  options = Options(1, Pool(10));
  options.execute = nullptr;
  EXPECT_TRUE(absl::IsInvalidArgument(Run(options)));
}

}  // namespace
}  // namespace zeroshard::nvme
