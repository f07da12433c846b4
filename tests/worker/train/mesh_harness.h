// Ranks of a mesh as threads of one process, each with a communicator for every line: trains a job
// and returns what a test compares.
#pragma once

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/worker/train/cluster_harness.h"
#include "worker/comm/line_communicator.h"
#include "worker/comm/tensor_group.h"
#include "worker/zero/sliced_store.h"

namespace zeroshard {

struct MeshRun {
  MeshShape shape;
  int virtual_stages = 1;
  bool full_gradients = false;
  RankBackend backend = {};
  std::vector<std::string> tensors = {};
  uint64_t first_step = 1;
  std::string resume_from = "";
  const TokenDataset* eval_data = nullptr;
  // Of an offloaded job: its rank's view of the stores, of whole units.
  std::function<std::unique_ptr<StateStore>(int rank)> store = nullptr;
  uint64_t next_sample = 0;
  // Called on the rank's thread before training, and after each step.
  std::function<absl::Status(int rank, Trainer* trainer)> prepare = nullptr;
  std::function<void(int rank, uint64_t step, Trainer* trainer)> on_step = nullptr;
  // Where it returns true the rank is gone: its communicators are aborted and it trains no further.
  std::function<bool(int rank, uint64_t step, StepPhase phase, const std::string& unit)> dies =
      nullptr;
  std::function<void(int rank, bool waits)> on_wait = nullptr;
  // What a rank's communicators are made with; Gloo where it is null.
  std::function<CommunicatorMaker(int rank)> communicators = nullptr;
};

// A rank's communicators, of lines with one rank too; copies as TrainerMesh has it.
struct MeshLinks {
  std::unique_ptr<Device> device;
  std::unique_ptr<Communicator> data, pipeline, tensor, copies, job;
  std::vector<Communicator*> All() const {
    std::vector<Communicator*> all;
    for (const auto* line : {&data, &pipeline, &tensor, &copies, &job})
      if (*line != nullptr) all.push_back(line->get());
    return all;
  }
  void Abort(const std::string& reason) {
    for (Communicator* line : All()) line->Abort(reason);
  }
  TrafficTable Traffic() const {
    TrafficTable sum{};
    for (const Communicator* line : All()) {
      const TrafficTable table = TrafficOf(*line);
      for (size_t op = 0; op < table.size(); ++op)
        for (size_t phase = 0; phase < table[op].size(); ++phase)
          sum[op][phase] += table[op][phase];
    }
    return sum;
  }
};

// Communicators of one job over those of `links`, as its device reaches them.
inline MeshLinks Reach(const MeshLinks& links, const RankBackend& backend, Device* device) {
  const auto reach = [&](const std::unique_ptr<Communicator>& line) {
    std::unique_ptr<Communicator> own;
    if (line == nullptr) return own;
    own = std::make_unique<LentCommunicator>(line.get());
    return backend.comm ? backend.comm(std::move(own), device) : std::move(own);
  };
  return {.device = nullptr,
          .data = reach(links.data),
          .pipeline = reach(links.pipeline),
          .tensor = reach(links.tensor),
          .copies = reach(links.copies),
          .job = reach(links.job)};
}

// `copies`: tensor ranks with the same key and value heads.
struct MeshConnections {
  MeshConnections(const MeshShape& of, int copies)
      : shape(of), copies(copies), links(static_cast<size_t>(of.Ranks())) {}
  const MeshShape shape;
  const int copies;
  MemoryRendezvous rendezvous;
  std::vector<MeshLinks> links;

  absl::Status Connect(int rank, const CommunicatorMaker& make) {
    MeshLinks& own = links[static_cast<size_t>(rank)];
    if (own.device != nullptr) return absl::OkStatus();
    own.device = MakeCpuDevice();
    CommunicatorOptions options;
    options.rank = rank;
    options.size = shape.Ranks();
    options.host = "127.0.0.1";
    options.operation_timeout = absl::Seconds(60);
    const MeshPosition at = PositionOf(shape, rank);
    const auto line = [&](const char* name, MeshDimension dimension,
                          int number) -> absl::StatusOr<std::unique_ptr<Communicator>> {
      return MakeLineCommunicator({name, number, LineOf(shape, dimension, rank)}, options,
                                  &rendezvous, own.device.get(), make);
    };
    auto data = line("data", MeshDimension::kData, at.pipeline * shape.tensor + at.tensor);
    if (!data.ok()) return data.status();
    own.data = *std::move(data);
    auto pipeline = line("pipeline", MeshDimension::kPipeline, at.data * shape.tensor + at.tensor);
    if (!pipeline.ok()) return pipeline.status();
    own.pipeline = *std::move(pipeline);
    auto tensor = MakeTensorLines(
        {"tensor", at.pipeline * shape.data + at.data, LineOf(shape, MeshDimension::kTensor, rank)},
        copies, options, &rendezvous, own.device.get(), make);
    if (!tensor.ok()) return tensor.status();
    own.tensor = std::move(tensor->line);
    own.copies = std::move(tensor->copies);
    auto job = make(options, &rendezvous, own.device.get());
    if (!job.ok()) return job.status();
    own.job = *std::move(job);
    return absl::OkStatus();
  }
};

// As IdleConnections: connecting takes longer than most jobs here. Only the latest mesh is kept:
// the threads of each one's lines wake up all the time.
class IdleMeshes {
 public:
  static std::unique_ptr<MeshConnections> Take(const MeshShape& shape, int copies) {
    std::unique_ptr<MeshConnections> idle = std::move(Idle());
    return idle != nullptr && IsLike(*idle, shape, copies)
               ? std::move(idle)
               : std::make_unique<MeshConnections>(shape, copies);
  }
  static void Give(std::unique_ptr<MeshConnections> mesh) { Idle() = std::move(mesh); }

 private:
  static bool IsLike(const MeshConnections& mesh, const MeshShape& shape, int copies) {
    return mesh.copies == copies && mesh.shape.pipeline == shape.pipeline &&
           mesh.shape.data == shape.data && mesh.shape.tensor == shape.tensor;
  }
  static std::unique_ptr<MeshConnections>& Idle() {
    static std::unique_ptr<MeshConnections> idle;
    return idle;
  }
};

// Of the job's model.
inline int CopiesOf(const v1::JobSpec& spec, int tensor) {
  return KeyValueCopies(*MakeModelConfig(spec.model()), tensor);
}

class MeshObserver : public TrainObserver {
 public:
  MeshObserver(int rank, RankResult* result, const MeshRun* run, Trainer* trainer, MeshLinks* links)
      : rank_(rank), result_(*result), run_(*run), trainer_(trainer), links_(links) {}
  void OnProgress(uint64_t step, StepPhase phase, const std::string& unit) override {
    if (!run_.dies || !run_.dies(rank_, step, phase, unit)) return;
    links_->Abort("the rank is gone");
    stop = true;
  }
  void OnWait(bool waits) override {
    if (run_.on_wait) run_.on_wait(rank_, waits);
  }
  void OnStep(const v1::StepRecord& record) override {
    result_.records.push_back(record);
    if (run_.on_step) run_.on_step(rank_, record.step(), trainer_);
  }
  void OnCheckpoint(const v1::CheckpointRecord& record) override {
    result_.checkpoints.push_back(record);
  }
  std::atomic<bool> stop{false};

 private:
  const int rank_;
  RankResult& result_;
  const MeshRun& run_;
  Trainer* const trainer_;
  MeshLinks* const links_;
};

inline void RunMeshRank(const v1::JobSpec& spec, const MeshRun& run, const TokenDataset& data,
                        int rank, MeshConnections* mesh, RankResult* result) {
  const RankBackend& backend = run.backend;
  const std::unique_ptr<Device> device = backend.device ? backend.device(rank) : MakeCpuDevice();
  const std::unique_ptr<Ops> ops = backend.ops ? backend.ops(device.get()) : MakeCpuOps(1);
  const CommunicatorMaker make =
      run.communicators ? run.communicators(rank) : CommunicatorMaker(MakeGlooCommunicator);
  result->status = mesh->Connect(rank, make);
  if (!result->status.ok()) return;
  MeshLinks links = Reach(mesh->links[static_cast<size_t>(rank)], backend, device.get());
  const TrafficTable before = links.Traffic();
  TrainerOptions options;
  options.spec = spec;
  if (run.full_gradients) options.spec.mutable_zero_optimization()->set_pipeline_gradients("full");
  options.device = device.get();
  options.ops = ops.get();
  options.comm = links.data.get();
  options.mesh = {.shape = run.shape,
                  .virtual_stages = run.virtual_stages,
                  .pipeline = links.pipeline.get(),
                  .tensor = links.tensor.get(),
                  .copies = links.copies.get(),
                  .job = links.job.get()};
  options.data = &data;
  options.eval_data = run.eval_data;
  options.first_step = run.first_step;
  options.resume_from = run.resume_from;
  std::unique_ptr<StateStore> store = run.store ? run.store(rank) : nullptr;
  if (store != nullptr) {
    store = MakeSlicedStore(std::move(store),
                            MakeTensorRank(*MakeModelTable(spec.model()), run.shape.tensor,
                                           PositionOf(run.shape, rank).tensor),
                            ComputeType(spec));
    if (backend.store) store = backend.store(std::move(store), device.get(), ComputeType(spec));
  }
  options.store = store.get();
  options.next_sample = run.next_sample;
  options.job = spec.name();
  options.run_id = "mesh-1";
  auto trainer = Trainer::Create(options);
  result->status = trainer.status();
  if (result->status.ok() && run.prepare) result->status = run.prepare(rank, trainer->get());
  const auto abort = [&](const std::string& reason) {
    links.Abort(reason);
    if (store != nullptr) store->Abort(reason);
  };
  if (!result->status.ok()) return abort(std::string(result->status.message()));
  MeshObserver observer(rank, result, &run, trainer->get(), &links);
  result->status = (*trainer)->Run(&observer, observer.stop);
  result->traffic = links.Traffic();
  for (size_t op = 0; op < before.size(); ++op)
    for (size_t phase = 0; phase < before[op].size(); ++phase)
      result->traffic[op][phase] -= before[op][phase];
  result->last_step = (*trainer)->last_step();
  for (int phase = 0; phase < kStepPhases; ++phase)
    result->phases[phase] = (*trainer)->counters().phase_nanoseconds[phase];
  result->stage_wait = (*trainer)->counters().pipeline_wait_nanoseconds;
  result->tokens = (*trainer)->counters().tokens;
  result->bubble = (*trainer)->bubble();
  for (int kind = 0; kind < kMemoryKinds; ++kind) {
    result->memory[kind] = device->memory().Bytes(static_cast<MemoryKind>(kind));
    result->peak[kind] = device->memory().PeakBytes(static_cast<MemoryKind>(kind));
  }
  if (!result->status.ok()) return abort("a rank failed");
  auto digest = (*trainer)->WeightsDigest();
  result->status = digest.status();
  if (digest.ok()) result->digest = *digest;
  for (const std::string& name : run.tensors) {
    auto tensor = (*trainer)->GatherTensor(name);
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    result->tensors.push_back(*std::move(tensor));
  }
}

// Trains on every rank; results by rank.
inline std::vector<RankResult> TrainMesh(const v1::JobSpec& spec, const MeshRun& run,
                                         const TokenDataset& data) {
  std::vector<RankResult> results(static_cast<size_t>(run.shape.Ranks()));
  const int copies = CopiesOf(spec, run.shape.tensor);
  std::unique_ptr<MeshConnections> mesh = run.communicators
                                              ? std::make_unique<MeshConnections>(run.shape, copies)
                                              : IdleMeshes::Take(run.shape, copies);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < run.shape.Ranks(); ++rank) {
    threads.emplace_back([&, rank] {
      const auto at = static_cast<size_t>(rank);
      RunMeshRank(spec, run, data, rank, mesh.get(), &results[at]);
      // All ranks at once: they may wait for each other. The device goes last.
      if (run.communicators) const MeshLinks gone = std::move(mesh->links[at]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const bool well = std::all_of(results.begin(), results.end(),
                                [](const RankResult& result) { return result.status.ok(); });
  if (well && !run.communicators) IdleMeshes::Give(std::move(mesh));
  return results;
}

// Trains and returns what every rank agrees on, bit for bit.
inline std::string MeshFingerprint(const v1::JobSpec& spec, const MeshRun& run,
                                   const TokenDataset& data) {
  const std::vector<RankResult> results = TrainMesh(spec, run, data);
  for (const RankResult& result : results) {
    EXPECT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.records.size(), spec.steps());
    EXPECT_EQ(Fingerprint(result), Fingerprint(results[0])) << "ranks disagree";
  }
  return Fingerprint(results[0]);
}

}  // namespace zeroshard
