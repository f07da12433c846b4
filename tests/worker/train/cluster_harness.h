// Ranks as threads of one process, over the real collectives, kernels and engine: trains a job and
// returns everything that a test compares.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/substitute.h"
#include "common/plan/planner.h"
#include "common/plan/zero_policy.h"
#include "common/spec/job_spec.h"
#include "gtest/gtest.h"
#include "tests/worker/train/lent_communicator.h"
#include "worker/comm/communicator.h"
#include "worker/comm/memory_rendezvous.h"
#include "worker/train/trainer.h"

namespace zeroshard {

// Tokens held in memory, cut into samples as TokenDataset says.
class MemoryDataset : public TokenDataset {
 public:
  MemoryDataset(std::vector<int32_t> tokens, int64_t sequence)
      : tokens_(std::move(tokens)), sequence_(sequence) {}
  int64_t token_count() const override { return static_cast<int64_t>(tokens_.size()); }
  int64_t sample_count() const override { return (token_count() - 1) / sequence_; }
  void Sample(int64_t index, absl::Span<int32_t> tokens,
              absl::Span<int32_t> targets) const override {
    for (int64_t i = 0; i < sequence_; ++i) {
      const size_t at = static_cast<size_t>(index * sequence_ + i);
      tokens[static_cast<size_t>(i)] = tokens_[at];
      targets[static_cast<size_t>(i)] = masked_ && masked_(index, i) ? -1 : tokens_[at + 1];
    }
  }
  // Targets for which this returns true carry no loss.
  void MaskTargets(std::function<bool(int64_t sample, int64_t position)> masked) {
    masked_ = std::move(masked);
  }

 private:
  std::vector<int32_t> tokens_;
  int64_t sequence_;
  std::function<bool(int64_t, int64_t)> masked_;
};

// A text-like sequence: each token depends on the one before, so there is something to learn.
inline std::vector<int32_t> ChainTokens(int64_t count, int32_t vocab, uint32_t seed = 1) {
  std::vector<int32_t> tokens;
  uint32_t state = seed;
  int32_t token = 0;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    token = (token * 3 + static_cast<int32_t>((state >> 16) % 5)) % vocab;
    tokens.push_back(token);
  }
  return tokens;
}

struct RankResult {
  absl::Status status;
  std::vector<v1::StepRecord> records;
  std::string digest;
  std::vector<std::vector<float>> tensors;        // those asked for
  int64_t memory[kMemoryKinds] = {};              // at the end, by MemoryKind
  int64_t buffer_peak = 0;                        // of a mesh
  int64_t peak[kMemoryKinds] = {};                // at most
  uint64_t phases[kStepPhases] = {};              // nanoseconds
  uint64_t stage_wait = 0;                        // of them waiting for other stages
  uint64_t tokens = 0;                            // that the rank counts
  BubbleShares bubble;
  TrafficTable traffic{};                         // of the training steps
  StepTraffic last_step;                          // as the trainer counts it
  std::vector<v1::CheckpointRecord> checkpoints;  // that rank 0 was told of
  std::vector<v1::SampleRecord> samples;
};

// What ranks compute on; what is null is the CPU's.
struct RankBackend {
  std::function<std::unique_ptr<Device>(int rank)> device = nullptr;
  std::function<std::unique_ptr<Ops>(Device*)> ops = nullptr;
  // The collectives and the stores as the device reaches them.
  std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>, Device*)> comm =
      nullptr;
  std::function<std::unique_ptr<StateStore>(std::unique_ptr<StateStore>, Device*, DType)> store =
      nullptr;
};

struct RunOptions {
  int world = 1;
  int threads = 1;
  RankBackend backend = {};
  std::vector<std::string> tensors = {};
  // Called on each rank before training.
  std::function<absl::Status(int rank, Trainer* trainer)> prepare = nullptr;
  // Called on the rank's thread with its trainer's communicator, after each step.
  std::function<void(int rank, const v1::StepRecord&)> on_step = nullptr;
  std::function<void(int rank, const std::string& unit)> on_progress = nullptr;
  // Called when a rank's Run has returned.
  std::function<void(int rank)> after_run = nullptr;
  // TrainerOptions of the same names.
  uint64_t first_step = 1;
  std::string resume_from = "";
  bool weights_only = false;
  std::string run_id = "tiny-1";
  const TokenDataset* eval_data = nullptr;
  const Tokenizer* tokenizer = nullptr;
  // Of an offloaded job: its rank's view of the stores.
  std::function<std::unique_ptr<StateStore>(int rank)> store = nullptr;
  uint64_t next_sample = 0;
  v1::LossScale loss_scale = {};
  bool evaluate = false;
  std::function<FileSystem*(int rank)> files = nullptr;
  // What a rank asks for at the end of step `step`.
  std::function<SaveRequest(int rank, uint64_t step)> wants_save = nullptr;
  std::function<void(const v1::CheckpointRecord&)> on_checkpoint = nullptr;
  std::function<absl::Status(int rank, uint64_t step)> before_commit = nullptr;
};

class RecordingObserver : public TrainObserver {
 public:
  RecordingObserver(int rank, RankResult* result, const RunOptions* options)
      : rank_(rank), result_(*result), options_(*options) {}
  void OnProgress(uint64_t step, StepPhase, const std::string& unit) override {
    step_ = step;
    if (options_.on_progress) options_.on_progress(rank_, unit);
  }
  void OnStep(const v1::StepRecord& record) override {
    result_.records.push_back(record);
    if (options_.on_step) options_.on_step(rank_, record);
  }
  absl::Status BeforeCommit() override {
    return options_.before_commit ? options_.before_commit(rank_, step_) : absl::OkStatus();
  }
  SaveRequest WantsSave() override {
    return options_.wants_save ? options_.wants_save(rank_, step_) : SaveRequest::kNone;
  }
  void OnCheckpoint(const v1::CheckpointRecord& record) override {
    result_.checkpoints.push_back(record);
    if (options_.on_checkpoint) options_.on_checkpoint(record);
  }
  void OnSample(const v1::SampleRecord& record) override { result_.samples.push_back(record); }

 private:
  const int rank_;
  RankResult& result_;
  const RunOptions& options_;
  uint64_t step_ = 0;
};

// Communicators of one world.
struct Connections {
  explicit Connections(int world)
      : devices(static_cast<size_t>(world)), comms(static_cast<size_t>(world)) {}
  MemoryRendezvous rendezvous;
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<std::unique_ptr<Communicator>> comms;

  absl::Status Connect(int rank) {
    const auto r = static_cast<size_t>(rank);
    if (comms[r] != nullptr) return absl::OkStatus();
    devices[r] = MakeCpuDevice();
    CommunicatorOptions gloo;
    gloo.rank = rank;
    gloo.size = static_cast<int>(comms.size());
    gloo.host = "127.0.0.1";
    gloo.operation_timeout = absl::Seconds(60);
    auto comm = MakeGlooCommunicator(gloo, &rendezvous, devices[r].get());
    if (comm.ok()) comms[r] = *std::move(comm);
    return comm.status();
  }
};

// Those of jobs that went well serve the next one of the same world: connecting and hanging up take
// longer than most jobs of these tests. Used by a test's main thread.
class IdleConnections {
 public:
  static std::unique_ptr<Connections> Take(int world) {
    std::unique_ptr<Connections>& idle = Idle()[world];
    return idle != nullptr ? std::move(idle) : std::make_unique<Connections>(world);
  }
  static void Give(int world, std::unique_ptr<Connections> connections) {
    Idle()[world] = std::move(connections);
  }

 private:
  static std::map<int, std::unique_ptr<Connections>>& Idle() {
    static std::map<int, std::unique_ptr<Connections>> idle;
    return idle;
  }
};

inline TrafficTable TrafficOf(const Communicator& comm) {
  TrafficTable table{};
  for (int op = 0; op < kCollectiveOps; ++op)
    for (int phase = 0; phase < kPhases; ++phase)
      table[op][phase] =
          comm.traffic().Get(static_cast<CollectiveOp>(op), static_cast<Phase>(phase));
  return table;
}

inline void RunRank(const v1::JobSpec& spec, const RunOptions& options, const TokenDataset& data,
                    int rank, Connections* connections, RankResult* result) {
  const RankBackend& backend = options.backend;
  std::unique_ptr<Device> device = backend.device ? backend.device(rank) : MakeCpuDevice();
  std::unique_ptr<Ops> ops = backend.ops ? backend.ops(device.get()) : MakeCpuOps(options.threads);
  result->status = connections->Connect(rank);
  if (!result->status.ok()) return;
  std::unique_ptr<Communicator> comm =
      std::make_unique<LentCommunicator>(connections->comms[static_cast<size_t>(rank)].get());
  if (backend.comm) comm = backend.comm(std::move(comm), device.get());
  const TrafficTable before = TrafficOf(*comm);
  TrainerOptions trainer_options;
  trainer_options.spec = spec;
  trainer_options.device = device.get();
  trainer_options.ops = ops.get();
  trainer_options.comm = comm.get();
  trainer_options.data = &data;
  trainer_options.first_step = options.first_step;
  trainer_options.resume_from = options.resume_from;
  trainer_options.weights_only = options.weights_only;
  trainer_options.job = spec.name();
  trainer_options.run_id = options.run_id;
  trainer_options.eval_data = options.eval_data;
  trainer_options.tokenizer = options.tokenizer;
  if (options.files) trainer_options.files = options.files(rank);
  std::unique_ptr<StateStore> store = options.store ? options.store(rank) : nullptr;
  if (store != nullptr && backend.store)
    store = backend.store(std::move(store), device.get(), ComputeType(spec));
  trainer_options.store = store.get();
  trainer_options.next_sample = options.next_sample;
  trainer_options.loss_scale = options.loss_scale;
  trainer_options.evaluate = options.evaluate;
  auto trainer = Trainer::Create(trainer_options);
  if (!trainer.ok()) {
    comm->Abort(std::string(trainer.status().message()));
    result->status = trainer.status();
    return;
  }
  if (options.prepare) {
    result->status = options.prepare(rank, trainer->get());
    ASSERT_TRUE(result->status.ok()) << result->status;
  }
  RecordingObserver observer(rank, result, &options);
  const std::atomic<bool> stop{false};
  result->status = (*trainer)->Run(&observer, stop);
  if (options.after_run) options.after_run(rank);
  result->traffic = TrafficOf(*comm);
  result->last_step = (*trainer)->last_step();
  for (int op = 0; op < kCollectiveOps; ++op)
    for (int phase = 0; phase < kPhases; ++phase) result->traffic[op][phase] -= before[op][phase];
  for (int kind = 0; kind < kMemoryKinds; ++kind) {
    result->memory[kind] = device->memory().Bytes(static_cast<MemoryKind>(kind));
    result->peak[kind] = device->memory().PeakBytes(static_cast<MemoryKind>(kind));
  }
  for (int phase = 0; phase < kStepPhases; ++phase)
    result->phases[phase] = (*trainer)->counters().phase_nanoseconds[phase];
  if (!result->status.ok()) {
    comm->Abort("a rank failed");
    if (store != nullptr) store->Abort("a rank failed");
    return;
  }
  auto digest = (*trainer)->WeightsDigest();
  result->status = digest.status();
  if (digest.ok()) result->digest = *digest;
  for (const std::string& name : options.tensors) {
    auto tensor = (*trainer)->GatherTensor(name);
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    result->tensors.push_back(*std::move(tensor));
  }
}

// Trains on every rank; results by rank.
inline std::vector<RankResult> TrainJob(const v1::JobSpec& spec, const RunOptions& options,
                                        const TokenDataset& data) {
  std::vector<RankResult> results(static_cast<size_t>(options.world));
  std::unique_ptr<Connections> connections = IdleConnections::Take(options.world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options.world; ++rank)
    threads.emplace_back([&, rank] {
      RunRank(spec, options, data, rank, connections.get(), &results[static_cast<size_t>(rank)]);
    });
  for (std::thread& thread : threads) thread.join();
  const bool well = std::all_of(results.begin(), results.end(),
                                [](const RankResult& result) { return result.status.ok(); });
  if (well) IdleConnections::Give(options.world, std::move(connections));
  return results;
}

// A normalised job of `text`, plus overrides "key.path=value".
inline v1::JobSpec MakeSpec(const std::string& text,
                            const std::vector<std::string>& overrides = {}) {
  auto spec = ParseJobSpec(text, "test.yaml", overrides);
  EXPECT_TRUE(spec.ok()) << spec.status();
  if (!spec.ok()) return {};
  const absl::Status status = NormaliseJobSpec(&*spec);
  EXPECT_TRUE(status.ok()) << status;
  return *spec;
}

// Small models that still cross every boundary: shards that split rows, several blocks, three
// micro-batches of two sequences.
inline std::string TinyJob(const std::string& model) {
  return "name: tiny\nmodel: {" + model +
         ", hidden_size: 32, layers: 3, heads: 4, sequence_length: 24, vocab_size: 61}" + R"(
data: {train: [unused], tokenizer: tokens}
resources: {workers: 1}
train_batch_size: 6
train_micro_batch_size_per_gpu: 2
steps: 4
seed: 7
optimizer: {type: AdamW, params: {lr: 3.0e-3, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.1}}
scheduler: {type: cosine, params: {warmup_steps: 2, min_lr: 3.0e-4}}
gradient_clipping: 1.0
zero_optimization: {stage: 0, stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0}
)";
}

inline const char* TinyGpt2() {
  static const std::string text = TinyJob("architecture: gpt2");
  return text.c_str();
}

inline const char* TinyLlama() {
  static const std::string text =
      TinyJob("architecture: llama, kv_heads: 2, intermediate_size: 80");
  return text.c_str();
}

inline MemoryDataset TinyData() { return MemoryDataset(ChainTokens(24 * 40 + 1, 61), 24); }

// Losses, norms and final weights, bit for bit.
inline std::string Fingerprint(const RankResult& result) {
  std::string text;
  for (const v1::StepRecord& r : result.records)
    absl::StrAppendFormat(&text, "%d %a %a %a %d\n", r.step(), r.loss(), r.grad_norm(),
                          r.learning_rate(), r.tokens());
  return text + result.digest;
}

// Trains and returns what every rank agrees on, bit for bit.
inline std::string TrainFingerprint(const v1::JobSpec& spec, const RunOptions& options,
                                    const TokenDataset& data) {
  const std::vector<RankResult> results = TrainJob(spec, options, data);
  for (const RankResult& result : results) {
    EXPECT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.records.size(), spec.steps());
    EXPECT_EQ(Fingerprint(result), Fingerprint(results[0])) << "ranks disagree";
  }
  return Fingerprint(results[0]);
}

}  // namespace zeroshard
