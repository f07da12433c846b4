// A backend whose trainer does what the test says instead of training. Memory, collectives and the
// trainer count how many of them are alive.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "worker/agent/backend.h"
#include "worker/ops/cpu_ops.h"

namespace zeroshard {

// What a test sees of the runs, and how it steers them.
struct FakeTraining {
  // Called once for each step; what it returns ends the run where it is not OK.
  std::function<absl::Status(uint64_t step)> on_step = [](uint64_t) { return absl::OkStatus(); };
  // Called when a rank is asked to save and stop; what it returns is how the save ended.
  std::function<absl::Status(uint64_t step)> on_save = [](uint64_t) { return absl::OkStatus(); };
  // Called with the observer after each step.
  std::function<void(TrainObserver*, uint64_t step)> after_step = [](TrainObserver*, uint64_t) {};
  // Called with what the trainer is made from, while that is there.
  std::function<void(const TrainerOptions&)> on_create = [](const TrainerOptions&) {};
  // Called with how the ranks connect.
  std::function<void(const CommunicatorOptions&)> on_connect = [](const CommunicatorOptions&) {};
  // Called with how each data set is opened.
  std::function<void(const v1::DataSpec&, const DatasetOptions&)> on_open =
      [](const v1::DataSpec&, const DatasetOptions&) {};
  // Called with where a pull's elements go; it is done when this returns.
  std::function<void(void* out, int64_t elements)> on_pull = [](void*, int64_t) {};
  // Called with how the stores of an offloaded job are opened; an error is the opening's.
  std::function<absl::Status(const StoreClientOptions&)> on_open_store =
      [](const StoreClientOptions&) { return absl::OkStatus(); };
  absl::Status create_status;
  std::string numerics = "avx512";  // the fingerprint of what it computes with
  std::atomic<int> alive{0};        // parts of jobs that exist now
  std::atomic<int> trainers{0};     // created so far
  bool lonely = false;              // the peers' addresses are there, but nobody ever connects
  std::mutex mutex;
  std::condition_variable changed;
  std::string aborted;        // why the collectives were aborted last
  std::string store_aborted;  // why the stores were

  // As a collective does: waits for a peer that never comes, until it is aborted.
  absl::Status WaitForAbort() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return !aborted.empty(); });
    return absl::AbortedError("all_gather: " + aborted);
  }

  // As a pull does, whose version never comes.
  absl::Status WaitForStoreAbort() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return !store_aborted.empty(); });
    return absl::AbortedError("pull: " + store_aborted);
  }

  // Connecting, which ends with the timeout or when it is cancelled.
  absl::Status WaitForPeers(const CommunicatorOptions& options) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto end =
        std::chrono::steady_clock::now() + absl::ToChronoMilliseconds(options.connect_timeout);
    while (std::chrono::steady_clock::now() < end) {
      if (options.cancelled != nullptr && *options.cancelled) return absl::AbortedError("stopped");
      changed.wait_for(lock, std::chrono::milliseconds(5));
    }
    return absl::DeadlineExceededError("rank 1 did not connect");
  }
};

class FakeCommunicator : public Communicator {
 public:
  FakeCommunicator(int rank, int size, FakeTraining* training)
      : rank_(rank), size_(size), training_(training) {
    ++training_->alive;
    std::lock_guard<std::mutex> lock(training_->mutex);
    training_->aborted.clear();
  }
  ~FakeCommunicator() override { --training_->alive; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Event AllGather(void*, int64_t, DType, const CollectiveInfo&, const Event&) override {
    return {};
  }
  Event ReduceScatter(ReduceScatterArgs, const CollectiveInfo&, const Event&) override {
    return {};
  }
  Event AllReduce(void*, int64_t, DType, const CollectiveInfo&, const Event&) override {
    return {};
  }
  Event Broadcast(void*, int64_t, int, const CollectiveInfo&, const Event&) override { return {}; }
  Event Send(const void*, int64_t, int, const CollectiveInfo&, const Event&) override { return {}; }
  Event Recv(void*, int64_t, int, const CollectiveInfo&, const Event&) override { return {}; }
  Event Barrier(const CollectiveInfo&) override { return {}; }
  absl::Status AllGatherHost(void*, int64_t, const CollectiveInfo&) override {
    return absl::OkStatus();
  }
  void Abort(const std::string& reason) override {
    std::lock_guard<std::mutex> lock(training_->mutex);
    training_->aborted = reason;
    training_->changed.notify_all();
  }
  const TrafficCounters& traffic() const override { return traffic_; }
  double BusySeconds() const override { return 0; }

 private:
  const int rank_;
  const int size_;
  FakeTraining* const training_;
  TrafficCounters traffic_;
};

class FakeOps : public cpu::CpuOps {
 public:
  explicit FakeOps(std::string fingerprint)
      : cpu::CpuOps(1), fingerprint_(std::move(fingerprint)) {}
  std::string Fingerprint() const override { return fingerprint_; }

 private:
  const std::string fingerprint_;
};

class FakeStore : public StateStore {
 public:
  FakeStore(const v1::StateVersion& base, FakeTraining* training)
      : base_(base), training_(training) {
    ++training_->alive;
    counters_.pushed = 300;
    counters_.pulled = 500;
  }
  ~FakeStore() override { --training_->alive; }
  v1::StateVersion base() const override { return base_; }
  Event Push(uint64_t, int, int64_t, int64_t, const void*, const Event&) override { return {}; }
  Event Pull(uint64_t, int, int64_t begin, int64_t end, void* out, const Event&) override {
    training_->on_pull(out, end - begin);
    return {};
  }
  absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord&, uint64_t, uint64_t) override {
    return v1::StepDecision();
  }
  void Abort(const std::string& reason) override {
    std::lock_guard<std::mutex> lock(training_->mutex);
    training_->store_aborted = reason;
    training_->changed.notify_all();
  }
  const OffloadCounters& counters() const override { return counters_; }

 private:
  const v1::StateVersion base_;
  FakeTraining* const training_;
  OffloadCounters counters_;
};

class FakeTrainer : public Trainer {
 public:
  FakeTrainer(const TrainerOptions& options, Buffer memory, FakeTraining* training)
      : options_(options), memory_(std::move(memory)), training_(training) {
    ++training_->alive;
    ++training_->trainers;
  }
  ~FakeTrainer() override { --training_->alive; }

  absl::Status Run(TrainObserver* observer, const std::atomic<bool>& stop) override {
    std::vector<int32_t> tokens(options_.spec.model().sequence_length()), targets(tokens.size());
    for (uint64_t step = options_.first_step; step <= options_.spec.steps(); ++step) {
      options_.data->Sample(0, absl::MakeSpan(tokens), absl::MakeSpan(targets));
      observer->OnProgress(step, StepPhase::kForward, "blocks.0");
      if (stop) return absl::CancelledError("stopped");
      absl::Status status = training_->on_step(step);
      if (!status.ok()) return status;
      counters_.tokens += 10;
      v1::StepRecord record;
      record.set_step(step);
      record.set_loss(1.0 / static_cast<double>(step));
      record.set_tokens(10);
      observer->OnStep(record);
      training_->after_step(observer, step);
      if (observer->WantsSave() != SaveRequest::kSaveAndStop) continue;
      observer->OnProgress(step, StepPhase::kBarrier, "saving");
      if (absl::Status saved = training_->on_save(step); !saved.ok()) return saved;
      v1::CheckpointRecord checkpoint;
      checkpoint.set_step(step);
      checkpoint.set_path("/ckpt/step-" + std::to_string(step));
      checkpoint.set_complete(true);
      observer->OnCheckpoint(checkpoint);
      return absl::CancelledError("saved step " + std::to_string(step));
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> WeightsDigest() override {
    return options_.store == nullptr ? "digest" : "";
  }
  absl::StatusOr<std::vector<float>> GatherTensor(const std::string&) override {
    return absl::UnimplementedError("not for these tests");
  }
  absl::Status SetTensor(const std::string&, absl::Span<const float>) override {
    return absl::UnimplementedError("not for these tests");
  }
  const TrainCounters& counters() const override { return counters_; }

 private:
  const TrainerOptions options_;
  const Buffer memory_;
  FakeTraining* const training_;
  TrainCounters counters_;
};

// 4096 bytes of parameters a job.
inline WorkerBackend MakeFakeBackend(FakeTraining* training) {
  WorkerBackend backend;
  backend.threads = 3;
  backend.open_data = [training](const v1::DataSpec& spec, int64_t sequence, int64_t vocab_size,
                                 const DatasetOptions& options) {
    training->on_open(spec, options);
    return TokenDataset::Open(spec, sequence, vocab_size, options);
  };
  backend.make_device = [] { return MakeCpuDevice(); };
  backend.make_ops = [training](Device*, const OpsOptions& options) {
    return std::make_unique<FakeOps>(training->numerics + (options.tf32 ? " tf32" : ""));
  };
  backend.make_communicator = [training](const CommunicatorOptions& options, Rendezvous* rendezvous,
                                         Device*) -> absl::StatusOr<std::unique_ptr<Communicator>> {
    absl::Status put = rendezvous->Put("address/" + std::to_string(options.rank), options.host);
    if (!put.ok()) return put;
    training->on_connect(options);
    if (training->lonely) return training->WaitForPeers(options);
    return std::make_unique<FakeCommunicator>(options.rank, options.size, training);
  };
  backend.open_store =
      [training](const StoreClientOptions& options) -> absl::StatusOr<std::unique_ptr<StateStore>> {
    if (absl::Status status = training->on_open_store(options); !status.ok()) return status;
    return std::make_unique<FakeStore>(options.base, training);
  };
  backend.make_trainer =
      [training](const TrainerOptions& options) -> absl::StatusOr<std::unique_ptr<Trainer>> {
    training->on_create(options);
    if (!training->create_status.ok()) return training->create_status;
    absl::StatusOr<Buffer> memory = options.device->Allocate(4096, MemoryKind::kParameters);
    if (!memory.ok()) return memory.status();
    return std::make_unique<FakeTrainer>(options, *std::move(memory), training);
  };
  return backend;
}

}  // namespace zeroshard
