#include "shard_store/nvme/staging.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <thread>

#include "tests/common/temp_folder.h"
#include "tests/shard_store/nvme/disk_faults.h"

namespace zeroshard::nvme {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Verdict = DiskHook::Verdict;

constexpr int64_t kLong = 2 * kBlockElements + 500;  // three blocks

class StagingTest : public OverEngines {
 protected:
  void SetUp() override {
    Open(12);
    if (io_ == nullptr) return;
    readers_ = Pool(2);
    ChunkFileOptions options;
    options.dir = folder_.path();
    options.run_id = "run";
    options.io = io_.get();
    for (const auto& [chunk, n] : std::map<uint32_t, uint64_t>{{0, kLong}, {1, 1}, {2, 4000}}) {
      options.chunks[chunk] = {static_cast<int64_t>(n), {4 * n, 4 * n, 4 * n, 2 * n, 2 * n}};
    }
    options.chunks[3] = {100, {0, 0, 0, 200, 0}};
    auto file = ChunkFile::Create(options);
    ASSERT_TRUE(file.ok()) << file.status();
    file_ = *file;
    gradients_ = Bytes(static_cast<size_t>(kLong) * 2, 1);
  }
  void Start(int buffers) {
    StagingOptions options;
    options.file = file_;
    options.pool = Pool(buffers);
    options.timeout = absl::Seconds(20);
    staging_ = std::make_unique<Staging>(options);
  }
  void TearDown() override {
    staging_.reset();
    file_.reset();
    io_.reset();
  }
  absl::Status Stage(uint32_t chunk, int64_t begin, int64_t count, uint64_t version = 1) {
    const absl::Span<const char> bytes(gradients_.data() + 2 * begin,
                                       2 * static_cast<size_t>(count));
    // In two parts that end anywhere, as messages do.
    const size_t cut = bytes.size() / 3;
    const absl::Span<const char> parts[] = {bytes.first(cut), {}, bytes.subspan(cut)};
    return staging_->Stage(chunk, version, begin, count, parts);
  }
  std::vector<char> Read(uint32_t chunk, int64_t elements) {
    std::vector<char> bytes(static_cast<size_t>(elements) * 2);
    const absl::Status status =
        file_->ReadRange(chunk, kStaging, 1, 0, absl::MakeSpan(bytes), readers_.get());
    EXPECT_TRUE(status.ok()) << status;
    return bytes;
  }
  void ExpectStaged(uint32_t chunk, int64_t elements) {
    const std::vector<char> seen = Read(chunk, elements);
    EXPECT_TRUE(std::equal(seen.begin(), seen.end(), gradients_.begin())) << chunk;
  }

  TempFolder folder_;
  std::shared_ptr<ChunkFile> file_;
  std::shared_ptr<BufferPool> readers_;
  std::unique_ptr<Staging> staging_;
  std::vector<char> gradients_;
};

INSTANTIATE_TEST_SUITE_P(Engines, StagingTest, ::testing::Values(Engine::kRing, Engine::kThreads),
                         EngineName);

TEST_P(StagingTest, RangesOfAnyAlignmentMakeWholeChunks) {
  Start(4);
  for (int64_t at = 0; at < kLong;) {
    const int64_t count = std::min<int64_t>(100'003, kLong - at);
    ASSERT_TRUE(Stage(0, at, count).ok());
    at += count;
  }
  ASSERT_TRUE(Stage(1, 0, 1).ok());
  ASSERT_TRUE(Stage(2, 0, 4000).ok());
  ASSERT_TRUE(staging_->Flush().ok());
  ExpectStaged(0, kLong);
  ExpectStaged(1, 1);
  ExpectStaged(2, 4000);
}

TEST_P(StagingTest, WithOneBufferBegunBlocksAreWrittenAndReadBack) {
  Start(1);
  // Each call begins another block than the one before.
  for (int64_t at = 0; at < kBlockElements; at += kBlockElements / 2) {
    for (int64_t block = 0; block < 2; ++block) {
      ASSERT_TRUE(Stage(0, block * kBlockElements + at, kBlockElements / 2).ok());
    }
    ASSERT_TRUE(Stage(0, 2 * kBlockElements + (at == 0 ? 250 : 0), 250).ok());
  }
  ASSERT_TRUE(staging_->Flush().ok());
  ExpectStaged(0, kLong);
}

TEST_P(StagingTest, SeveralStreamsAtOnceInAnyOrder) {
  Start(3);
  std::vector<int64_t> cuts = {0, kLong};
  std::mt19937 random(7);
  for (int i = 0; i < 40; ++i) cuts.push_back(static_cast<int64_t>(random() % kLong));
  std::sort(cuts.begin(), cuts.end());
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (size_t i = 1; i < cuts.size(); ++i) ranges.push_back({cuts[i - 1], cuts[i] - cuts[i - 1]});
  std::shuffle(ranges.begin(), ranges.end(), random);
  std::vector<absl::Status> statuses(4);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < statuses.size(); ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = t; i < ranges.size() && statuses[t].ok(); i += statuses.size()) {
        statuses[t] = Stage(0, ranges[i].first, ranges[i].second);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(staging_->Flush().ok());
  ExpectStaged(0, kLong);
}

TEST_P(StagingTest, WhatComesAgainIsOverwrittenAlsoWhereItIsWrittenAlready) {
  Start(2);
  const std::vector<char> right = gradients_;
  gradients_ = Bytes(gradients_.size(), 99);
  ASSERT_TRUE(Stage(0, 0, kLong).ok());
  ASSERT_TRUE(staging_->Flush().ok());
  gradients_ = right;
  ASSERT_TRUE(Stage(0, 0, kBlockElements + 10).ok());
  ASSERT_TRUE(Stage(0, kBlockElements + 10, kLong - kBlockElements - 10).ok());
  ASSERT_TRUE(staging_->Flush().ok());
  ExpectStaged(0, kLong);
}

TEST_P(StagingTest, AMissingPartIsNamed) {
  Start(2);
  ASSERT_TRUE(Stage(0, 0, kBlockElements + 10).ok());
  const absl::Status status = staging_->Flush();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("chunk 0 staging block 1"), HasSubstr("20 of 524288 bytes")));
}

TEST_P(StagingTest, DroppedGradientsAreGoneAndOthersMayCome) {
  Start(2);
  ASSERT_TRUE(Stage(2, 0, 4000).ok());
  ASSERT_TRUE(Stage(0, 0, 10).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(Stage(0, 10, 10, 2))) << "of another step";
  ASSERT_TRUE(staging_->Drop().ok());
  std::vector<char> bytes(8000);
  EXPECT_TRUE(absl::IsFailedPrecondition(
      file_->ReadRange(2, kStaging, 1, 0, absl::MakeSpan(bytes), readers_.get())));
  EXPECT_TRUE(staging_->Flush().ok());
  ASSERT_TRUE(Stage(2, 0, 4000, 2).ok());
  ASSERT_TRUE(staging_->Flush().ok());
  EXPECT_TRUE(file_->ReadRange(2, kStaging, 2, 0, absl::MakeSpan(bytes), readers_.get()).ok());
}

TEST_P(StagingTest, AFailedWriteIsReportedByWhatComesNextUntilDropped) {
  Start(2);
  faults_.Set([](const DiskHook::Attempt& a) { return a.write ? Answer(-EIO) : Verdict{}; });
  (void)Stage(2, 0, 4000);
  EXPECT_THAT(std::string(staging_->Flush().message()), HasSubstr(strerror(EIO)));
  EXPECT_THAT(std::string(Stage(0, 0, 1).message()), HasSubstr(strerror(EIO)));
  faults_.Set({});
  ASSERT_TRUE(staging_->Drop().ok());
  ASSERT_TRUE(Stage(2, 0, 4000).ok());
  ASSERT_TRUE(staging_->Flush().ok());
  ExpectStaged(2, 4000);
}

TEST_P(StagingTest, DamageOfABlockThatIsReadBackIsFound) {
  Start(1);
  ASSERT_TRUE(Stage(0, 0, 10).ok());
  faults_.Set([](const DiskHook::Attempt& a) { return a.write ? Answer(a.bytes) : Verdict{}; });
  ASSERT_TRUE(Stage(2, 0, 4000).ok());  // the begun block is written, and lost
  faults_.Set({});
  const absl::Status status = Stage(0, 10, 10);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
}

TEST_P(StagingTest, WhatDoesNotFitIsRefused) {
  Start(1);
  const std::vector<char> bytes(100);
  const absl::Span<const char> parts[] = {bytes};
  EXPECT_TRUE(absl::IsInvalidArgument(staging_->Stage(0, 1, 0, 51, parts)));
  EXPECT_TRUE(absl::IsInvalidArgument(staging_->Stage(0, 1, -1, 50, parts)));
  EXPECT_TRUE(absl::IsInvalidArgument(staging_->Stage(0, 1, kLong - 49, 50, parts)));
  EXPECT_TRUE(absl::IsInvalidArgument(staging_->Stage(1, 1, 0, 50, parts)));
  EXPECT_TRUE(absl::IsInvalidArgument(staging_->Stage(3, 1, 0, 50, parts))) << "frozen";
  EXPECT_TRUE(absl::IsInvalidArgument(staging_->Stage(9, 1, 0, 50, parts)));
}

}  // namespace
}  // namespace zeroshard::nvme
