// What a job on a device that the host cannot reach measures, says and saves is the CPU's.
#include <atomic>
#include <string>
#include <vector>

#include "tests/worker/train/guarded_backend.h"
#include "tests/worker/train/offload_harness.h"

namespace zeroshard {
namespace {

class GuardedFiles : public testing::TestWithParam<uint64_t> {
 protected:
  RankBackend Backend() const { return GuardedBackend(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Seeds, GuardedFiles, testing::Range<uint64_t>(0, 2 * kSchedules));

// A job that evaluates after every step and continues a prompt after steps 3 and 4.
v1::JobSpec SpeakingSpec(Shape shape, Offload offload) {
  v1::JobSpec spec = Spec(TinyLlama(), shape, offload, {"model.vocab_size=256"});
  spec.mutable_eval()->add_data("unused");
  spec.mutable_eval()->set_interval_steps(1);
  spec.mutable_data()->set_tokenizer("bytes");
  spec.mutable_sample()->set_interval_steps(3);
  spec.mutable_sample()->add_prompts("The ");
  spec.mutable_sample()->set_max_tokens(5);
  spec.mutable_sample()->set_temperature(0.8);
  return spec;
}

std::vector<std::string> Said(const std::vector<RankResult>& results) {
  std::vector<std::string> all;
  for (const RankResult& result : results) {
    EXPECT_TRUE(result.status.ok()) << result.status;
    for (const v1::StepRecord& record : result.records)
      all.push_back(absl::StrFormat("%d %a %a", record.step(), record.loss(), record.eval_loss()));
    for (const v1::SampleRecord& sample : result.samples)
      all.push_back(absl::StrFormat("%d %s", sample.step(), sample.text()));
  }
  return all;
}

TEST_P(GuardedFiles, EvaluationAndSamplesAreTheCpus) {
  const MemoryDataset data(ChainTokens(24 * 40 + 1, 256), 24);
  const MemoryDataset eval(ChainTokens(24 * 11 + 1, 256, 99), 24);
  const auto tokenizer = Tokenizer::Load("bytes");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  for (const Shape shape : {Shape{1, 0}, Shape{2, 2}, Shape{2, 3}}) {
    for (const Offload offload : {Offload::kNone, Offload::kOptimizer, Offload::kAll}) {
      if (shape.stage < 3 && offload != Offload::kNone) continue;
      const v1::JobSpec spec = SpeakingSpec(shape, offload);
      const auto run = [&](const RankBackend& backend) {
        RunOptions options{.world = shape.world, .backend = backend};
        options.eval_data = &eval;
        options.tokenizer = tokenizer->get();
        if (offload == Offload::kNone) return Said(TrainJob(spec, options, data));
        MemoryStores stores(spec, {});
        return Said(TrainOffloaded(spec, options, data, &stores));
      };
      const std::vector<std::string> expected = run({});
      EXPECT_EQ(expected.size(), static_cast<size_t>(shape.world) * 4 + 2);
      EXPECT_EQ(run(Backend()), expected) << "stage " << shape.stage;
    }
  }
}

// A save is copied and written while the next step is computed; every other step is saved.
TEST_P(GuardedFiles, CheckpointsHoldTheCpusStateAndAreGoneOnFrom) {
  const MemoryDataset data = TinyData();
  struct Job {
    Shape shape;
    std::vector<std::string> more;
  };
  for (const Job& job : {Job{{2, 3}, {"bf16.enabled=true"}}, Job{{3, 1}, {"bf16.enabled=false"}},
                         Job{{2, 0}, {"bf16.enabled=true", "model.trainable=['blocks.1.*']"}}}) {
    SCOPED_TRACE(testing::Message() << "stage " << job.shape.stage);
    MemoryFolder folder;
    const auto save = [&](const std::string& dir, RunOptions options) {
      v1::JobSpec spec = SavingSpec(TinyGpt2(), job.shape, 4, folder / dir, job.more);
      spec.mutable_checkpoint()->set_interval_steps(2);
      options.world = job.shape.world;
      const auto results = TrainJob(spec, options, data);
      ExpectAllOk(results);
      return Fingerprint(results[0]);
    };
    const auto path = [&](const std::string& dir, uint64_t step) {
      return folder / dir + "/" + CheckpointName(step);
    };
    const std::string numbers = save("cpu", {});
    EXPECT_EQ(save("guarded", {.backend = Backend()}), numbers);
    for (const uint64_t step : {2, 4}) {
      ExpectSameState(ReadState(path("guarded", step)), ReadState(path("cpu", step)),
                      absl::StrFormat("step %d", step));
    }
    RunOptions resumed = Resume(job.shape.world, path("guarded", 2), 2);
    resumed.backend = Backend();
    save("resumed", resumed);
    ExpectSameState(ReadState(path("resumed", 4)), ReadState(path("cpu", 4)), "resumed");
  }
}

// The host gives the device no memory of about that size of the kind that it copies from fastest.
class UnpinnedDevice : public GuardedDevice {
 public:
  UnpinnedDevice(uint64_t seed, size_t without, std::atomic<int>* refused)
      : GuardedDevice(seed), without_(without), refused_(refused) {}
  absl::StatusOr<Buffer> AllocateHost(size_t bytes) override {
    if (bytes < without_ || bytes > without_ + without_ / 8)
      return GuardedDevice::AllocateHost(bytes);
    ++*refused_;
    return absl::ResourceExhaustedError("no pinned memory");
  }

 private:
  const size_t without_;
  std::atomic<int>* const refused_;
};

TEST_P(GuardedFiles, CheckpointsAreWrittenWhereNoMemoryCanBePinned) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  std::atomic<int> refused = 0;
  const auto save = [&](const std::string& dir, const RankBackend& backend) {
    const v1::JobSpec spec = SavingSpec(TinyGpt2(), {1, 2}, 4, folder / dir);
    const auto results = TrainJob(spec, {.backend = backend}, data);
    ExpectAllOk(results);
    return ReadState(folder / dir + "/" + CheckpointName(4));
  };
  const State expected = save("cpu", {});
  size_t parameters = 0;
  for (const auto& [name, values] : expected.of[0]) parameters += values.size();
  RankBackend backend = Backend();
  backend.device = [&](int) {
    return std::make_unique<UnpinnedDevice>(GetParam(), parameters * sizeof(float), &refused);
  };
  ExpectSameState(save("unpinned", backend), expected, "step 4");
  EXPECT_EQ(refused, 3) << "master weights and two moments";
}

TEST_P(GuardedFiles, TensorsAreSetAndReadThroughTheDevice) {
  const MemoryDataset data = TinyData();
  for (const Shape shape : {Shape{2, 1}, Shape{3, 3}}) {
    const auto run = [&](const RankBackend& backend) {
      RunOptions options{.world = shape.world, .backend = backend};
      options.tensors = {"wte.weight", "blocks.1.mlp.fc.weight", "ln_f.bias"};
      options.prepare = [](int, Trainer* trainer) {
        return trainer->SetTensor("ln_f.bias", std::vector<float>(32, 0.125f));
      };
      const auto results =
          TrainJob(Spec(TinyGpt2(), shape, Offload::kNone, {"bf16.enabled=true"}), options, data);
      ExpectAllOk(results);
      for (const RankResult& result : results) EXPECT_EQ(result.tensors, results[0].tensors);
      return results[0].tensors;
    };
    EXPECT_EQ(run(Backend()), run({}));
  }
}

}  // namespace
}  // namespace zeroshard
