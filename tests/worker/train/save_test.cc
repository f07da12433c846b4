// Saving while training goes on: when, what is in a checkpoint, and what happens when it cannot be
// written.
#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>

#include "absl/time/clock.h"
#include "common/checkpoint/state_digest.h"
#include "common/checkpoint/store.h"
#include "common/files.h"
#include "common/hf/config.h"
#include "common/hf/export.h"
#include "common/hf/weights.h"
#include "common/status_payloads.h"
#include "gmock/gmock.h"
#include "tests/worker/train/checkpoint_harness.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

// The real one, which asks `before_append` before anything is written to a state file.
class GuardedFiles : public FileSystem {
 public:
  std::function<absl::Status(const std::string& path)> before_append;

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    auto file = FileSystem::Real().Create(path);
    if (!file.ok()) return file.status();
    return std::make_unique<File>(this, path, *std::move(file));
  }
  absl::Status MakeFolder(const std::string& path) override {
    return FileSystem::Real().MakeFolder(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return FileSystem::Real().Rename(from, to);
  }
  absl::Status RemoveAll(const std::string& path) override {
    return FileSystem::Real().RemoveAll(path);
  }
  absl::Status SyncFolder(const std::string& path) override {
    return FileSystem::Real().SyncFolder(path);
  }

 private:
  class File : public WritableFile {
   public:
    File(GuardedFiles* owner, std::string path, std::unique_ptr<WritableFile> file)
        : owner_(owner), path_(std::move(path)), file_(std::move(file)) {}
    absl::Status Append(const void* data, size_t bytes) override {
      if (owner_->before_append && path_.find("state-") != std::string::npos) {
        absl::Status status = owner_->before_append(path_);
        if (!status.ok()) return status;
      }
      return file_->Append(data, bytes);
    }
    absl::Status SyncAndClose() override { return file_->SyncAndClose(); }

   private:
    GuardedFiles* const owner_;
    const std::string path_;
    const std::unique_ptr<WritableFile> file_;
  };
};

std::vector<uint64_t> CompleteSteps(const std::string& dir) {
  std::vector<uint64_t> steps;
  const auto found = ListCheckpoints(dir);
  EXPECT_TRUE(found.ok()) << found.status();
  if (!found.ok()) return steps;
  for (const CheckpointSummary& c : *found)
    if (c.complete) steps.push_back(c.step);
  return steps;
}

bool IsWaiting(const std::string& unit) { return unit.find("waiting for the checkpoint") == 0; }

std::vector<std::string> Names(const std::string& dir) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(dir))
    names.push_back(entry.path().filename().string());
  return names;
}

TEST(SaveTest, SavesWhenDueAndAfterTheLastStep) {
  const MemoryDataset data = TinyData();
  for (const Shape shape : {Shape{1, 0}, Shape{3, 2}}) {
    MemoryFolder folder;
    v1::JobSpec spec = SavingSpec(TinyGpt2(), shape, 7, folder / "ckpt");
    spec.mutable_checkpoint()->set_interval_steps(3);
    const auto results = TrainJob(spec, {.world = shape.world}, data);
    ExpectAllOk(results);
    EXPECT_EQ(CompleteSteps(folder / "ckpt"), (std::vector<uint64_t>{3, 6, 7}));
    ASSERT_EQ(results[0].checkpoints.size(), 3u);
    for (const v1::CheckpointRecord& record : results[0].checkpoints) {
      EXPECT_TRUE(record.complete()) << record.message();
      EXPECT_EQ(record.path(), folder / ("ckpt/" + CheckpointName(record.step())));
      const auto reader = CheckpointReader::Open(record.path());
      ASSERT_TRUE(reader.ok()) << reader.status();
      uint64_t bytes = 0;
      for (const CheckpointFile& file : (*reader)->manifest().files) bytes += file.bytes;
      EXPECT_EQ(record.bytes(), bytes);
      EXPECT_EQ((*reader)->manifest().step, record.step());
      EXPECT_EQ((*reader)->manifest().next_sample, record.step() * 6);
      EXPECT_EQ((*reader)->manifest().world_size, static_cast<uint32_t>(shape.world));
      EXPECT_EQ((*reader)->manifest().run_id, "tiny-1");
    }
    for (size_t rank = 1; rank < results.size(); ++rank)
      EXPECT_TRUE(results[rank].checkpoints.empty()) << "rank 0's to report";
  }
}

// Saving is in nobody's way: the same bits, and the same bytes a step where none is due.
TEST(SaveTest, ChangesNoBitOfTraining) {
  const MemoryDataset data = TinyData();
  for (const Shape shape : {Shape{1, 0}, Shape{2, 1}, Shape{2, 3}}) {
    MemoryFolder folder;
    const auto without =
        TrainJob(SavingSpec(TinyGpt2(), shape, 6, ""), {.world = shape.world}, data);
    v1::JobSpec spec = SavingSpec(TinyGpt2(), shape, 6, folder / "ckpt");
    spec.mutable_checkpoint()->set_interval_steps(1);
    const auto with = TrainJob(spec, {.world = shape.world}, data);
    ExpectAllOk(with);
    EXPECT_EQ(Fingerprint(with[0]), Fingerprint(without[0]));
    // The manifest's digest of the weights is the run's.
    const auto last = CheckpointReader::Open(folder / ("ckpt/" + CheckpointName(6)));
    ASSERT_TRUE(last.ok()) << last.status();
    EXPECT_EQ((*last)->manifest().digests[0], with[0].digest);
    // What a reader computes from the files is what the ranks did from memory.
    const ModelTable model = MakeModelTable(spec.model()).value();
    for (int kind = 0; kind < kStateKinds; ++kind) {
      EXPECT_EQ(DigestOf(**last, model, static_cast<StateKind>(kind)).value(),
                (*last)->manifest().digests[kind]);
    }
  }
}

// The copy runs beside the next step's forward and backward: what is saved is the state before its
// update all the same.
TEST(SaveTest, WhatIsSavedIsTheStateOfItsStepAndNotOfTheNext) {
  const MemoryDataset data = TinyData();
  for (const char* precision : {"bf16.enabled=false", "bf16.enabled=true"}) {
    for (const Shape shape : {Shape{1, 0}, Shape{2, 1}, Shape{2, 3}}) {
      MemoryFolder folder;
      v1::JobSpec spec = SavingSpec(TinyGpt2(), shape, 4, folder / "all", {precision});
      spec.mutable_checkpoint()->set_interval_steps(1);
      ExpectAllOk(TrainJob(spec, {.world = shape.world}, data));
      for (uint64_t step = 1; step < 4; ++step) {
        const std::string alone = folder / absl::StrFormat("to-%d", step);
        ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), shape, step, alone, {precision}),
                             {.world = shape.world}, data));
        ExpectSameState(ReadState(folder / ("all/" + CheckpointName(step))),
                        ReadState(alone + "/" + CheckpointName(step)), precision);
      }
    }
  }
}

TEST(SaveTest, OneRanksWishIsEnough) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  RunOptions options{.world = 3};
  options.wants_save = [](int rank, uint64_t step) {
    return rank == 2 && step == 2 ? SaveRequest::kSave : SaveRequest::kNone;
  };
  const auto results = TrainJob(SavingSpec(TinyGpt2(), {3, 3}, 5, folder / "ckpt"), options, data);
  ExpectAllOk(results);
  EXPECT_EQ(CompleteSteps(folder / "ckpt"), (std::vector<uint64_t>{2, 5}));
}

TEST(SaveTest, SaveAndStopEndsWithACompleteCheckpoint) {
  const MemoryDataset data = TinyData();
  for (const Shape shape : {Shape{1, 0}, Shape{2, 2}}) {
    MemoryFolder folder;
    RunOptions options{.world = shape.world};
    options.wants_save = [&](int rank, uint64_t step) {
      return rank == shape.world - 1 && step == 3 ? SaveRequest::kSaveAndStop : SaveRequest::kNone;
    };
    const auto results = TrainJob(SavingSpec(TinyGpt2(), shape, 8, folder / "ckpt"), options, data);
    for (const RankResult& result : results) {
      EXPECT_EQ(result.status, absl::CancelledError("saved step 3"));
      EXPECT_EQ(result.records.size(), 3u);
    }
    EXPECT_EQ(CompleteSteps(folder / "ckpt"), (std::vector<uint64_t>{3}));
    ASSERT_EQ(results[0].checkpoints.size(), 1u);
    EXPECT_TRUE(results[0].checkpoints[0].complete());
  }
}

// The disk of one rank is full while it writes step 2's part: nobody keeps anything of it, and the
// job goes on.
TEST(SaveTest, AFullDiskOnOneRankAbandonsTheSaveEverywhereAndTheJobGoesOn) {
  const MemoryDataset data = TinyData();
  for (int full : {0, 1, 2}) {
    MemoryFolder folder;
    const std::string dir = folder / "ckpt";
    GuardedFiles files;
    files.before_append = [](const std::string& path) {
      if (path.find("step-00000002") == std::string::npos) return absl::OkStatus();
      return ErrnoError(ENOSPC, "write", path);
    };
    v1::JobSpec spec = SavingSpec(TinyGpt2(), {3, 1}, 8, dir);
    spec.mutable_checkpoint()->set_interval_steps(2);
    RunOptions options{.world = 3};
    options.files = [&](int rank) { return rank == full ? &files : nullptr; };
    const auto results = TrainJob(spec, options, data);
    ExpectAllOk(results);
    EXPECT_EQ(CompleteSteps(dir), (std::vector<uint64_t>{4, 6, 8}));
    for (const std::string& name : Names(dir))
      EXPECT_EQ(name.find("00000002"), std::string::npos) << name << " was left behind";
    ASSERT_EQ(results[0].checkpoints.size(), 4u);
    const v1::CheckpointRecord& record = results[0].checkpoints[0];
    EXPECT_EQ(record.step(), 2u);
    EXPECT_FALSE(record.complete());
    // Whoever tells of it says of which step it was.
    EXPECT_THAT(record.message(), StartsWith(absl::StrFormat("rank %d: ", full)));
    EXPECT_THAT(record.message(), HasSubstr("No space left on device"));
    EXPECT_THAT(record.message(), HasSubstr(absl::StrFormat("%s/state-%05d-of-00003.safetensors",
                                                            CollectFolder(dir, 2), full)));
  }
}

// The last one cannot be written: the run does not end as if all were well.
TEST(SaveTest, ARunWhoseLastCheckpointCannotBeWrittenSaysSo) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  GuardedFiles files;
  files.before_append = [](const std::string& path) { return ErrnoError(ENOSPC, "write", path); };
  RunOptions options{.world = 2};
  options.files = [&](int rank) { return rank == 1 ? &files : nullptr; };
  const auto results = TrainJob(SavingSpec(TinyGpt2(), {2, 2}, 2, folder / "ckpt"), options, data);
  for (const RankResult& result : results) {
    EXPECT_FALSE(result.status.ok());
    EXPECT_EQ(result.status, results[0].status);
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("step 2 was trained"));
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("No space left on device"));
    EXPECT_EQ(result.records.size(), 2u);
  }
  EXPECT_TRUE(CompleteSteps(folder / "ckpt").empty());
}

// Training does not wait while files are written: steps go by before the first save may end. Then
// the next one is due, and waits.
TEST(SaveTest, TrainingGoesOnWhileFilesAreWrittenAndTheNextSaveWaits) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t trained = 0;
  bool timed_out = false;
  GuardedFiles files;
  files.before_append = [&](const std::string& path) {
    if (path.find("step-00000004") == std::string::npos) return absl::OkStatus();
    std::unique_lock<std::mutex> lock(mutex);
    timed_out |= !changed.wait_for(lock, std::chrono::seconds(30), [&] { return trained >= 7; });
    return absl::OkStatus();
  };
  v1::JobSpec spec = SavingSpec(TinyGpt2(), {2, 1}, 10, folder / "ckpt");
  spec.mutable_checkpoint()->set_interval_steps(4);
  RunOptions options{.world = 2};
  options.files = [&](int rank) { return rank == 1 ? &files : nullptr; };
  options.on_step = [&](int rank, const v1::StepRecord& record) {
    if (rank != 1) return;
    std::lock_guard<std::mutex> lock(mutex);
    trained = record.step();
    changed.notify_all();
  };
  const auto results = TrainJob(spec, options, data);
  ExpectAllOk(results);
  EXPECT_FALSE(timed_out) << "training waited for the files";
  EXPECT_EQ(CompleteSteps(folder / "ckpt"), (std::vector<uint64_t>{4, 8, 10}));
}

// A disk that hangs: the save that is due next is left out with a message, the job goes on.
TEST(SaveTest, AStuckSaveHoldsTrainingNoLongerThanACollectiveMayTake) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
  GuardedFiles files;
  files.before_append = [&](const std::string& path) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, std::chrono::seconds(30), [&] { return open; });
    return absl::OkStatus();
  };
  v1::JobSpec spec = SavingSpec(TinyGpt2(), {2, 1}, 5, folder / "ckpt");
  spec.mutable_checkpoint()->set_interval_steps(2);
  spec.mutable_timeouts()->set_collective_seconds(1);
  RunOptions options{.world = 2};
  options.files = [&](int rank) { return rank == 1 ? &files : nullptr; };
  options.on_checkpoint = [&](const v1::CheckpointRecord& record) {
    if (record.step() != 4) return;
    std::lock_guard<std::mutex> lock(mutex);
    open = true;
    changed.notify_all();
  };
  std::atomic<int> told{0};  // by rank 1, whose disk it is
  options.on_progress = [&](int rank, const std::string& unit) {
    if (rank == 1 && IsWaiting(unit)) ++told;
  };
  const auto results = TrainJob(spec, options, data);
  ExpectAllOk(results);
  EXPECT_LT(told, 40) << "a second of waiting in which nothing moved is no progress";
  EXPECT_EQ(CompleteSteps(folder / "ckpt"), (std::vector<uint64_t>{2, 5}));
  ASSERT_EQ(results[0].checkpoints.size(), 3u);
  EXPECT_EQ(results[0].checkpoints[0].step(), 4u);
  EXPECT_FALSE(results[0].checkpoints[0].complete());
  EXPECT_THAT(results[0].checkpoints[0].message(), StartsWith("it was left out"));
}

// Token 60 comes up in step 3 only.
MemoryDataset DataThatPoisonsStep3() {
  std::vector<int32_t> tokens = ChainTokens(24 * 40 + 1, 60);
  const SampleOrder order(40, 7);
  tokens[static_cast<size_t>(order.At(2 * 6 + 2) * 24 + 3)] = 60;
  return MemoryDataset(tokens, 24);
}

absl::Status PoisonToken60(int, Trainer* trainer) {
  auto table = trainer->GatherTensor("embed.weight");
  if (!table.ok()) return table.status();
  (*table)[60 * 32 + 1] = std::numeric_limits<float>::infinity();
  return trainer->SetTensor("embed.weight", *table);
}

// A token whose embedding is infinite comes up in step 3, while the files of step 2's checkpoint
// are written. All ranks know of it and none is gone: what is on its way is completed, then the job
// ends.
TEST(SaveTest, ANonFiniteStepLeavesTheCheckpointBeforeItCompleteAndNoneAfterIt) {
  const MemoryDataset data = DataThatPoisonsStep3();
  for (const Shape shape : {Shape{1, 0}, Shape{2, 1}}) {
    MemoryFolder folder;
    v1::JobSpec spec = SavingSpec(TinyLlama(), shape, 6, folder / "ckpt");
    spec.mutable_checkpoint()->set_interval_steps(2);
    std::mutex mutex;
    std::condition_variable changed;
    int waiting = 0, told_by_rank_0 = 0;
    bool timed_out = false;
    GuardedFiles files;
    files.before_append = [&](const std::string&) {
      std::unique_lock<std::mutex> lock(mutex);
      timed_out |= !changed.wait_for(lock, std::chrono::seconds(30), [&] { return waiting > 0; });
      return absl::OkStatus();
    };
    RunOptions options{.world = shape.world};
    options.files = [&](int) { return &files; };
    options.on_progress = [&](int rank, const std::string& unit) {
      if (!IsWaiting(unit)) return;
      std::lock_guard<std::mutex> lock(mutex);
      ++waiting;
      if (rank == 0) ++told_by_rank_0;
      changed.notify_all();
    };
    options.prepare = PoisonToken60;
    const auto results = TrainJob(spec, options, data);
    EXPECT_FALSE(timed_out) << "the job ended without waiting for what was on its way";
    for (const RankResult& result : results) {
      EXPECT_EQ(result.status.code(), absl::StatusCode::kInternal) << result.status;
      EXPECT_TRUE(IsNonFinite(result.status));
      EXPECT_THAT(std::string(result.status.message()), HasSubstr("step 3"));
    }
    EXPECT_EQ(CompleteSteps(folder / "ckpt"), (std::vector<uint64_t>{2}));
    ASSERT_EQ(results[0].checkpoints.size(), 1u);
    EXPECT_TRUE(results[0].checkpoints[0].complete());
    EXPECT_GT(told_by_rank_0, 1) << "that it advances is said";
    for (const std::string& name : Names(folder / "ckpt"))
      EXPECT_EQ(name.find("0003"), std::string::npos) << name;
  }
}

// Then the job ends all the same, within the deadline of a collective.
TEST(SaveTest, ANonFiniteStepWaitsNoLongerForAStuckSaveThanACollectiveMayTake) {
  const MemoryDataset data = DataThatPoisonsStep3();
  MemoryFolder folder;
  v1::JobSpec spec = SavingSpec(TinyLlama(), {2, 1}, 6, folder / "ckpt");
  spec.mutable_checkpoint()->set_interval_steps(2);
  spec.mutable_timeouts()->set_collective_seconds(1);
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
  GuardedFiles files;
  files.before_append = [&](const std::string&) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, std::chrono::seconds(30), [&] { return open; });
    return absl::OkStatus();
  };
  RunOptions options{.world = 2};
  options.files = [&](int rank) { return rank == 1 ? &files : nullptr; };
  options.after_run = [&](int rank) {
    if (rank != 0) return;
    std::lock_guard<std::mutex> lock(mutex);
    open = true;
    changed.notify_all();
  };
  options.prepare = PoisonToken60;
  const absl::Time start = absl::Now();
  const auto results = TrainJob(spec, options, data);
  EXPECT_LT(absl::Now() - start, absl::Seconds(25)) << "not for as long as the disk is stuck";
  for (const RankResult& result : results) EXPECT_TRUE(IsNonFinite(result.status)) << result.status;
  EXPECT_TRUE(CompleteSteps(folder / "ckpt").empty());
}

// Two jobs at one time: the second is told who holds the folder, on every rank.
TEST(SaveTest, ASecondJobInTheFolderIsRefusedNamingTheFirst) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  CheckpointStoreOptions holder;
  holder.dir = folder / "ckpt";
  holder.job = "first";
  holder.run_id = "first-7";
  const auto held = CheckpointStore::Open(&FileSystem::Real(), holder);
  ASSERT_TRUE(held.ok()) << held.status();
  const auto results =
      TrainJob(SavingSpec(TinyGpt2(), {3, 1}, 2, folder / "ckpt"), {.world = 3}, data);
  for (const RankResult& result : results) {
    EXPECT_EQ(result.status.code(), absl::StatusCode::kFailedPrecondition) << result.status;
    EXPECT_EQ(result.status, results[0].status);
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("first-7"));
  }
}

TEST(SaveTest, OldOnesGoAsTheRuleSays) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  v1::JobSpec spec = SavingSpec(TinyGpt2(), {2, 1}, 7, folder / "ckpt");
  spec.mutable_checkpoint()->set_interval_steps(1);
  spec.mutable_checkpoint()->set_keep_last(1);
  spec.mutable_checkpoint()->set_keep_every(3);
  ExpectAllOk(TrainJob(spec, {.world = 2}, data));
  EXPECT_EQ(CompleteSteps(folder / "ckpt"), (std::vector<uint64_t>{3, 6, 7}));
}

TEST(SaveTest, SixteenBitWeightsOfAFreshModelAreAFolderWithItsConfig) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  v1::JobSpec spec = SavingSpec(TinyGpt2(), {2, 3}, 1, folder / "ckpt", {"bf16.enabled=true"});
  spec.mutable_zero_optimization()->set_stage3_gather_16bit_weights_on_model_save(true);
  ExpectAllOk(TrainJob(spec, {.world = 2}, data));
  const std::string checkpoint = folder / ("ckpt/" + CheckpointName(1));
  const auto config = ReadHfConfig(checkpoint + "/model");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->model.hidden_size(), 32u);
  const auto reader = CheckpointReader::Open(checkpoint);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_TRUE((*reader)->VerifyFiles(0, 1).ok());
}

// A model folder in, trained from exactly its weights, and carried along with each checkpoint.
TEST(SaveTest, AModelFolderIsTheBeginningAndItsFilesTravelAlong) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  // Weights of a run of another seed, as a Hugging Face folder.
  ExpectAllOk(TrainJob(SavingSpec(TinyLlama(), {1, 0}, 1, folder / "first", {"seed=11"}),
                       {.world = 1}, data));
  const auto first = CheckpointReader::Open(folder / ("first/" + CheckpointName(1)));
  ASSERT_TRUE(first.ok()) << first.status();
  HfExportOptions to;
  to.dtype = DType::kF32;
  const absl::Status exported = ExportHfFolder(
      (*first)->manifest().spec.model(), *(*first)->Source(StateKind::kMaster), folder / "hf", to);
  ASSERT_TRUE(exported.ok()) << exported;
  std::ofstream(folder / "hf/tokenizer.json") << "{}";
  const State wanted = ReadState(folder / ("first/" + CheckpointName(1)));

  for (const Shape shape : {Shape{1, 0}, Shape{3, 3}}) {
    const std::string dir = folder / absl::StrFormat("second-%d", shape.world);
    v1::JobSpec spec = SavingSpec(TinyLlama(), shape, 1, dir, Still());
    spec.mutable_model()->set_init_from(folder / "hf");
    const auto resolved = ResolveInitFrom(&spec);
    ASSERT_TRUE(resolved.ok()) << resolved.status();
    spec.mutable_zero_optimization()->set_stage3_gather_16bit_weights_on_model_save(true);
    ExpectAllOk(TrainJob(spec, {.world = shape.world}, data));
    const std::string checkpoint = dir + "/" + CheckpointName(1);
    const State seen = ReadState(checkpoint);
    EXPECT_EQ(seen.of[0], wanted.of[0]) << "nothing moves a weight at this learning rate";
    const auto reader = CheckpointReader::Open(checkpoint);
    ASSERT_TRUE(reader.ok()) << reader.status();
    std::vector<std::string> names;
    for (const CheckpointFile& file : (*reader)->manifest().files) names.push_back(file.name);
    for (const char* name : {"assets/config.json", "assets/tokenizer.json", "model/config.json",
                             "model/tokenizer.json", "model/model.safetensors"})
      EXPECT_THAT(names, testing::Contains(std::string(name)));
    // The 16-bit weights are the masters rounded.
    const auto model = MakeModelTable(spec.model());
    ASSERT_TRUE(model.ok());
    std::vector<std::string> warnings;
    const auto weights = HfWeights::Open(checkpoint + "/model", *model, &warnings);
    ASSERT_TRUE(weights.ok()) << weights.status();
    const auto ops = MakeCpuOps(1);
    for (const UnitTable& unit : model->units) {
      for (const ParameterInfo& tensor : unit.parameters) {
        std::vector<float> read(static_cast<size_t>(tensor.size)), back(read.size());
        ASSERT_TRUE((*weights)->Read(tensor, 0, tensor.size, read.data()).ok());
        std::vector<uint16_t> rounded(read.size());
        ops->Convert(wanted.of[0].at(tensor.name).data(), DType::kF32, tensor.size, rounded.data(),
                     DType::kBF16);
        ops->Convert(rounded.data(), DType::kBF16, tensor.size, back.data(), DType::kF32);
        EXPECT_EQ(read, back) << tensor.name;
      }
    }
  }
}

}  // namespace
}  // namespace zeroshard
