#include "coordinator/service/snapshot_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/reader.h"
#include "common/checkpoint/state_digest.h"
#include "common/plan/model_table.h"
#include "common/spec/job_spec.h"
#include "tests/common/temp_folder.h"
#include "tests/coordinator/service/store_files.h"

namespace zeroshard::coordinator {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kPatience = std::chrono::seconds(60);

// Holds up Create of a path with `gate` in it until it is opened.
class GatedFiles : public FileSystem {
 public:
  explicit GatedFiles(std::string gate) : gate_(std::move(gate)) {}

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    if (path.find(gate_) != std::string::npos) {
      std::unique_lock<std::mutex> lock(mutex_);
      ++waiting_;
      changed_.notify_all();
      changed_.wait_for(lock, kPatience, [this] { return open_; });
      --waiting_;
    }
    return Real().Create(path);
  }
  absl::Status MakeFolder(const std::string& path) override { return Real().MakeFolder(path); }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return Real().Rename(from, to);
  }
  absl::Status RemoveAll(const std::string& path) override { return Real().RemoveAll(path); }
  absl::Status SyncFolder(const std::string& path) override { return Real().SyncFolder(path); }

  bool AwaitWaiting() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kPatience, [this] { return waiting_ > 0; });
  }
  void Open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  const std::string gate_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
  bool open_ = false;
};

class SnapshotWriterTest : public ::testing::Test {
 protected:
  std::unique_ptr<SnapshotWriter> Make(FileSystem* files = &FileSystem::Real()) {
    return std::make_unique<SnapshotWriter>(
        SnapshotWriter::Options{files, &clock_, [this](Event event) {
                                  std::lock_guard<std::mutex> lock(mutex_);
                                  events_.push_back(std::move(event));
                                  changed_.notify_all();
                                }});
  }
  // The next answer, which must be of that kind.
  template <typename E>
  E Next() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, kPatience, [this] { return !events_.empty(); })) {
      ADD_FAILURE() << "no answer";
      return E();
    }
    Event event = std::move(events_.front());
    events_.pop_front();
    E* found = std::get_if<E>(&event);
    EXPECT_NE(found, nullptr) << "an answer of another kind: " << event.index();
    return found == nullptr ? E() : std::move(*found);
  }
  bool Quiet() {
    std::lock_guard<std::mutex> lock(mutex_);
    return events_.empty();
  }

  v1::JobSpec Spec(const std::string& dir) {
    v1::JobSpec spec;
    spec.set_name("demo");
    v1::ModelSpec& model = *spec.mutable_model();
    model.set_architecture("gpt2");
    model.set_hidden_size(16);
    model.set_layers(1);
    model.set_heads(2);
    model.set_sequence_length(8);
    model.set_vocab_size(256);
    spec.mutable_data()->add_train("/data");
    spec.mutable_data()->set_tokenizer("bytes");
    spec.mutable_resources()->set_workers(1);
    spec.set_train_batch_size(4);
    spec.set_train_micro_batch_size_per_gpu(2);
    spec.set_steps(100);
    spec.mutable_optimizer()->set_type("AdamW");
    spec.mutable_checkpoint()->set_dir(dir);
    EXPECT_EQ(NormaliseJobSpec(&spec), absl::OkStatus());
    return spec;
  }
  OpenSnapshots Opening(const v1::JobSpec& spec, const std::string& run_id = "demo-1",
                        const std::string& resumed_from = "") {
    OpenSnapshots open;
    open.run_id = run_id;
    open.job = "demo";
    open.spec = spec;
    open.resumed_from = resumed_from;
    return open;
  }

  CompleteSnapshot Completing(uint64_t step, std::vector<v1::SnapshotReport> files) {
    CompleteSnapshot complete;
    complete.run_id = "demo-1";
    complete.step = step;
    complete.next_sample = step * 4;
    complete.samples = 1000;
    complete.files = std::move(files);
    complete.seconds = 2.5;
    return complete;
  }

  TempFolder folder_;
  ManualClock clock_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Event> events_;
};

TEST_F(SnapshotWriterTest, WhatStoresWriteBecomesACheckpointThatReadsBack) {
  v1::JobSpec spec = Spec(folder_ / "ckpt");
  spec.mutable_zero_optimization()->set_stage3_gather_16bit_weights_on_model_save(true);
  const auto writer = Make();
  writer->Do(Opening(spec));
  const auto opened = Next<SnapshotsOpened>();
  EXPECT_EQ(opened.run_id, "demo-1");
  ASSERT_TRUE(opened.status.ok()) << opened.status;
  writer->Do(BeginSnapshot{"demo-1", 7});
  const auto begun = Next<SnapshotBegun>();
  ASSERT_TRUE(begun.folder.ok()) << begun.folder.status();
  EXPECT_EQ(begun.step, 7u);
  EXPECT_TRUE(fs::is_directory(*begun.folder));
  writer->Do(Completing(7, WriteAsStores(spec, *begun.folder, 7, 3)));
  const auto completed = Next<SnapshotCompleted>();
  EXPECT_TRUE(completed.record.complete()) << completed.record.message();
  EXPECT_EQ(completed.record.step(), 7u);
  EXPECT_EQ(completed.record.path(), folder_ / "ckpt/step-00000007");
  EXPECT_EQ(completed.record.seconds(), 2.5);
  EXPECT_EQ(completed.record.pause_seconds(), 0);

  const auto reader = CheckpointReader::Open(completed.record.path());
  ASSERT_TRUE(reader.ok()) << reader.status();
  const Manifest& manifest = (*reader)->manifest();
  EXPECT_EQ(manifest.step, 7u);
  EXPECT_EQ(manifest.next_sample, 28u);
  EXPECT_EQ(manifest.samples, 1000u);
  EXPECT_EQ(manifest.run_id, "demo-1");
  EXPECT_EQ(manifest.world_size, 3u);
  EXPECT_EQ(manifest.unix_ms, absl::ToUnixMillis(clock_.Wall()) - 2500);
  uint64_t bytes = 0;
  for (const CheckpointFile& file : manifest.files) bytes += file.bytes;
  EXPECT_EQ(completed.record.bytes(), bytes);
  EXPECT_TRUE((*reader)->VerifyFiles(0, 1).ok());
  const auto model = MakeModelTable(spec.model());
  ASSERT_TRUE(model.ok());
  EXPECT_TRUE((*reader)->CheckModel(*model, true).ok());
  // The digests are those that a reader computes from the files.
  for (int kind = 0; kind < kStateKinds; ++kind) {
    const auto digest = DigestOf(**reader, *model, static_cast<StateKind>(kind));
    ASSERT_TRUE(digest.ok()) << digest.status();
    EXPECT_EQ(*digest, manifest.digests[kind]) << kind;
  }
  EXPECT_TRUE(fs::exists(completed.record.path() + "/model/model.safetensors"));
  EXPECT_TRUE(fs::exists(completed.record.path() + "/model/config.json"));
}

// The file that travels with a model, as a checkpoint keeps it and as a Hugging Face folder has it.
TEST_F(SnapshotWriterTest, WhatTravelsWithTheWeightsThatARunBeganWithIsCarriedOn) {
  fs::create_directories(folder_ / "old/assets");
  fs::create_directories(folder_ / "hf");
  std::ofstream(folder_ / "old/assets/generation_config.json") << "{\"of\": \"checkpoint\"}";
  std::ofstream(folder_ / "hf/generation_config.json") << "{\"of\": \"model\"}";
  const auto writer = Make();
  const auto kept = [&](OpenSnapshots open, const std::string& run_id) {
    open.run_id = run_id;
    const v1::JobSpec spec = open.spec;
    writer->Do(std::move(open));
    const auto opened = Next<SnapshotsOpened>();
    EXPECT_TRUE(opened.status.ok()) << opened.status;
    writer->Do(BeginSnapshot{run_id, 7});
    const auto begun = Next<SnapshotBegun>();
    if (!begun.folder.ok()) return begun.folder.status().ToString();
    CompleteSnapshot complete = Completing(7, WriteAsStores(spec, *begun.folder, 7, 1));
    complete.run_id = run_id;
    writer->Do(std::move(complete));
    const auto completed = Next<SnapshotCompleted>();
    EXPECT_TRUE(completed.record.complete()) << completed.record.message();
    std::ifstream file(completed.record.path() + "/assets/generation_config.json");
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  // Its weights alone: the run goes on from no checkpoint.
  OpenSnapshots weights = Opening(Spec(folder_ / "a"));
  weights.assets_from = folder_ / "old";
  EXPECT_EQ(kept(weights, "demo-1"), "{\"of\": \"checkpoint\"}");
  OpenSnapshots model = Opening(Spec(folder_ / "b"));
  model.spec.mutable_model()->set_init_from(folder_ / "hf");
  EXPECT_EQ(kept(model, "demo-2"), "{\"of\": \"model\"}");
  EXPECT_EQ(kept(Opening(Spec(folder_ / "c")), "demo-3"), "");
}

TEST_F(SnapshotWriterTest, AFileThatIsNotThereAbandonsTheSaveAndTheNextOneSucceeds) {
  const v1::JobSpec spec = Spec(folder_ / "ckpt");
  const auto writer = Make();
  writer->Do(Opening(spec));
  ASSERT_TRUE(Next<SnapshotsOpened>().status.ok());
  writer->Do(BeginSnapshot{"demo-1", 1});
  const auto first = Next<SnapshotBegun>();
  ASSERT_TRUE(first.folder.ok());
  std::vector<v1::SnapshotReport> files = WriteAsStores(spec, *first.folder, 1, 2);
  ASSERT_TRUE(fs::remove(*first.folder + "/" + files[1].file()));
  writer->Do(Completing(1, files));
  auto completed = Next<SnapshotCompleted>();
  EXPECT_FALSE(completed.record.complete());
  EXPECT_THAT(completed.record.message(),
              AllOf(HasSubstr(files[1].file()), HasSubstr("one folder for all hosts")));
  EXPECT_FALSE(fs::exists(*first.folder));
  EXPECT_FALSE(fs::exists(folder_ / "ckpt/step-00000001"));

  writer->Do(BeginSnapshot{"demo-1", 2});
  const auto second = Next<SnapshotBegun>();
  ASSERT_TRUE(second.folder.ok());
  writer->Do(Completing(2, WriteAsStores(spec, *second.folder, 2, 1)));
  completed = Next<SnapshotCompleted>();
  EXPECT_TRUE(completed.record.complete()) << completed.record.message();
  // The same step again is there already.
  writer->Do(BeginSnapshot{"demo-1", 2});
  EXPECT_EQ(Next<SnapshotBegun>().folder.status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(SnapshotWriterTest, WhatAStoreReportsIsNotTrusted) {
  const v1::JobSpec spec = Spec(folder_ / "ckpt");
  const auto writer = Make();
  writer->Do(Opening(spec));
  ASSERT_TRUE(Next<SnapshotsOpened>().status.ok());
  const auto try_with = [&](void (*damage)(v1::SnapshotReport*)) {
    writer->Do(BeginSnapshot{"demo-1", 3});
    const auto begun = Next<SnapshotBegun>();
    EXPECT_TRUE(begun.folder.ok()) << begun.folder.status();
    std::vector<v1::SnapshotReport> files = WriteAsStores(spec, *begun.folder, 3, 1);
    if (damage == nullptr) {
      files.clear();
    } else {
      damage(&files[0]);
    }
    writer->Do(Completing(3, files));
    const v1::CheckpointRecord record = Next<SnapshotCompleted>().record;
    EXPECT_FALSE(record.complete());
    EXPECT_FALSE(record.message().empty());
    EXPECT_FALSE(fs::exists(folder_ / "ckpt/step-00000003"));
    return record.message();
  };
  try_with(nullptr);
  try_with([](v1::SnapshotReport* r) { r->set_file("../../outside"); });
  try_with([](v1::SnapshotReport* r) { r->set_bytes(r->bytes() + 1); });
  EXPECT_THAT(try_with([](v1::SnapshotReport* r) { r->mutable_digests()->RemoveLast(); }),
              HasSubstr("wanted step 3 with 6 digests"));
  EXPECT_THAT(try_with([](v1::SnapshotReport* r) { r->set_problem("disk full"); }),
              HasSubstr("disk full"));
  EXPECT_THAT(try_with([](v1::SnapshotReport* r) { r->set_step(2); }), HasSubstr("of step 2"));
}

TEST_F(SnapshotWriterTest, AnAbandonedSaveLeavesNothingAndSaysWhy) {
  const v1::JobSpec spec = Spec(folder_ / "ckpt");
  const auto writer = Make();
  writer->Do(Opening(spec));
  ASSERT_TRUE(Next<SnapshotsOpened>().status.ok());
  writer->Do(BeginSnapshot{"demo-1", 5});
  const auto begun = Next<SnapshotBegun>();
  ASSERT_TRUE(begun.folder.ok());
  const auto files = WriteAsStores(spec, *begun.folder, 5, 1);
  writer->Do(AbandonSnapshot{"demo-1", 5, "store-1 is gone"});
  const auto completed = Next<SnapshotCompleted>();
  EXPECT_EQ(completed.step, 5u);
  EXPECT_FALSE(completed.record.complete());
  EXPECT_EQ(completed.record.message(), "store-1 is gone");
  EXPECT_FALSE(fs::exists(*begun.folder));
  // What comes late finds nothing to complete.
  writer->Do(Completing(5, files));
  EXPECT_THAT(Next<SnapshotCompleted>().record.message(), HasSubstr("step 5 has no folder"));
}

TEST_F(SnapshotWriterTest, AStepThatWasCompletedIsNotAbandonedAnyMore) {
  const v1::JobSpec spec = Spec(folder_ / "ckpt");
  const auto writer = Make();
  writer->Do(Opening(spec));
  ASSERT_TRUE(Next<SnapshotsOpened>().status.ok());
  writer->Do(BeginSnapshot{"demo-1", 5});
  const auto begun = Next<SnapshotBegun>();
  ASSERT_TRUE(begun.folder.ok());
  writer->Do(Completing(5, WriteAsStores(spec, *begun.folder, 5, 1)));
  writer->Do(AbandonSnapshot{"demo-1", 5, "too late"});
  writer->Do(BeginSnapshot{"demo-1", 6});
  EXPECT_TRUE(Next<SnapshotCompleted>().record.complete());
  EXPECT_TRUE(Next<SnapshotBegun>().folder.ok());
  EXPECT_TRUE(fs::exists(folder_ / "ckpt/step-00000005/manifest.json"));
  EXPECT_TRUE(Quiet());
}

TEST_F(SnapshotWriterTest, OneRunHoldsAFolderAndTheNextWaitsUntilItHasLetGo) {
  const v1::JobSpec spec = Spec(folder_ / "ckpt");
  const auto writer = Make();
  writer->Do(Opening(spec));
  EXPECT_TRUE(Next<SnapshotsOpened>().status.ok());
  writer->Do(Opening(spec));  // as it is open already
  EXPECT_TRUE(Next<SnapshotsOpened>().status.ok());
  writer->Do(Opening(spec, "demo-2"));
  const auto refused = Next<SnapshotsOpened>();
  EXPECT_EQ(refused.run_id, "demo-2");
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status.message()), HasSubstr("demo-1"));
  writer->Do(CloseSnapshots{"demo-1"});
  writer->Do(Opening(spec, "demo-2"));
  EXPECT_TRUE(Next<SnapshotsOpened>().status.ok());
  // The first is open no more.
  writer->Do(BeginSnapshot{"demo-1", 1});
  EXPECT_EQ(Next<SnapshotBegun>().folder.status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(SnapshotWriterTest, ALaterStartGoesOnFromItsOwnCheckpointAndSweepsWhatWasUnfinished) {
  const v1::JobSpec spec = Spec(folder_ / "ckpt");
  auto writer = Make();
  writer->Do(Opening(spec));
  ASSERT_TRUE(Next<SnapshotsOpened>().status.ok());
  writer->Do(BeginSnapshot{"demo-1", 5});
  auto begun = Next<SnapshotBegun>();
  ASSERT_TRUE(begun.folder.ok());
  writer->Do(Completing(5, WriteAsStores(spec, *begun.folder, 5, 1)));
  const std::string path = Next<SnapshotCompleted>().record.path();
  writer->Do(BeginSnapshot{"demo-1", 6});
  begun = Next<SnapshotBegun>();
  ASSERT_TRUE(begun.folder.ok());
  writer.reset();
  EXPECT_TRUE(fs::exists(*begun.folder));

  writer = Make();
  writer->Do(Opening(spec, "demo-1", path));
  const auto opened = Next<SnapshotsOpened>();
  ASSERT_TRUE(opened.status.ok()) << opened.status;
  EXPECT_FALSE(fs::exists(*begun.folder));
  writer->Do(BeginSnapshot{"demo-1", 6});
  EXPECT_TRUE(Next<SnapshotBegun>().folder.ok());
}

// The rename was done, the process died before its log said so.
TEST_F(SnapshotWriterTest, WhatWasCompletedWithoutBeingLoggedIsTheRunsOwn) {
  const v1::JobSpec spec = Spec(folder_ / "ckpt");
  auto writer = Make();
  writer->Do(Opening(spec));
  ASSERT_TRUE(Next<SnapshotsOpened>().status.ok());
  writer->Do(BeginSnapshot{"demo-1", 5});
  const auto begun = Next<SnapshotBegun>();
  ASSERT_TRUE(begun.folder.ok());
  writer->Do(Completing(5, WriteAsStores(spec, *begun.folder, 5, 1)));
  ASSERT_TRUE(Next<SnapshotCompleted>().record.complete());
  writer.reset();

  writer = Make();
  OpenSnapshots open = Opening(spec);
  writer->Do(open);
  EXPECT_EQ(Next<SnapshotsOpened>().status.code(), absl::StatusCode::kFailedPrecondition);
  open.under_way = 4;  // not that one
  writer->Do(open);
  EXPECT_EQ(Next<SnapshotsOpened>().status.code(), absl::StatusCode::kFailedPrecondition);
  OpenSnapshots other = Opening(spec, "demo-2");
  other.under_way = 5;  // of another run
  writer->Do(other);
  EXPECT_EQ(Next<SnapshotsOpened>().status.code(), absl::StatusCode::kFailedPrecondition);
  open.under_way = 5;
  writer->Do(open);
  const auto opened = Next<SnapshotsOpened>();
  ASSERT_TRUE(opened.status.ok()) << opened.status;
  writer->Do(BeginSnapshot{"demo-1", 5});
  EXPECT_EQ(Next<SnapshotBegun>().folder.status().code(), absl::StatusCode::kAlreadyExists);
  writer->Do(BeginSnapshot{"demo-1", 6});
  EXPECT_TRUE(Next<SnapshotBegun>().folder.ok());
  EXPECT_TRUE(fs::exists(folder_ / "ckpt/step-00000005/manifest.json"));
}

TEST_F(SnapshotWriterTest, AFolderThatHangsHoldsUpNoOtherAndNotTheEnd) {
  GatedFiles files("slow/");
  const v1::JobSpec slow = Spec(folder_ / "slow"), quick = Spec(folder_ / "quick");
  auto writer = Make(&files);
  writer->Do(Opening(slow));
  ASSERT_TRUE(Next<SnapshotsOpened>().status.ok());
  writer->Do(BeginSnapshot{"demo-1", 1});
  const auto begun = Next<SnapshotBegun>();
  ASSERT_TRUE(begun.folder.ok());
  writer->Do(Completing(1, WriteAsStores(slow, *begun.folder, 1, 1)));
  ASSERT_TRUE(files.AwaitWaiting());
  writer->Do(Opening(quick, "demo-2"));
  const auto opened = Next<SnapshotsOpened>();
  EXPECT_EQ(opened.run_id, "demo-2");
  EXPECT_TRUE(opened.status.ok()) << opened.status;
  files.Open();
  EXPECT_TRUE(Next<SnapshotCompleted>().record.complete());
}

TEST_F(SnapshotWriterTest, AfterItsEndNothingIsTold) {
  const v1::JobSpec spec = Spec(folder_ / "ckpt");
  for (int i = 0; i < 20; ++i) {
    auto writer = Make();
    writer->Do(Opening(spec));
    writer->Do(BeginSnapshot{"demo-1", 1});
    writer.reset();
    std::unique_lock<std::mutex> lock(mutex_);
    events_.clear();
    lock.unlock();
    EXPECT_TRUE(Quiet());
  }
}

TEST_F(SnapshotWriterTest, ARunThatWasNeverOpenedIsAnsweredToo) {
  const auto writer = Make();
  writer->Do(BeginSnapshot{"demo-9", 4});
  EXPECT_EQ(Next<SnapshotBegun>().folder.status().code(), absl::StatusCode::kFailedPrecondition);
  CompleteSnapshot complete;
  complete.run_id = "demo-9";
  complete.step = 4;
  writer->Do(complete);
  const auto completed = Next<SnapshotCompleted>();
  EXPECT_EQ(completed.record.step(), 4u);
  EXPECT_THAT(completed.record.message(), HasSubstr("demo-9"));
  writer->Do(CloseSnapshots{"demo-9"});
  EXPECT_TRUE(Quiet());
}

}  // namespace
}  // namespace zeroshard::coordinator
