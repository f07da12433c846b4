#include "tests/gpu/bench_steps.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/plan/zero_policy.h"
#include "common/spec/job_spec.h"
#include "common/status_macros.h"
#include "tests/gpu/bench.h"
#include "worker/comm/memory_rendezvous.h"
#include "worker/comm/nccl/cuda/make_nccl_communicator.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/device/cuda/make_cuda_device.h"
#include "worker/ops/cuda/cuda_ops.h"
#include "worker/zero/staged_store.h"

namespace zeroshard::gpu_bench {
namespace {

// The first steps allocate and choose kernels: they are not counted.
constexpr uint64_t kColdSteps = 2;

class RandomTokens : public TokenDataset {
 public:
  RandomTokens(int64_t sequence, int64_t vocab) : sequence_(sequence), vocab_(vocab) {}
  int64_t token_count() const override { return sequence_ * 4096 + 1; }
  int64_t sample_count() const override { return 4096; }
  void Sample(int64_t index, absl::Span<int32_t> tokens,
              absl::Span<int32_t> targets) const override {
    uint32_t state = static_cast<uint32_t>(index) * 2654435761u + 1;
    for (int64_t i = 0; i < sequence_; ++i) {
      state = state * 1664525u + 1013904223u;
      tokens[static_cast<size_t>(i)] = static_cast<int32_t>(state % vocab_);
      targets[static_cast<size_t>(i)] = static_cast<int32_t>((state >> 8) % vocab_);
    }
  }

 private:
  const int64_t sequence_;
  const uint32_t vocab_;
};

// Marks on the compute stream where the training thread begins a phase: between two of them lies
// what that phase put there.
class PhaseObserver : public TrainObserver {
 public:
  explicit PhaseObserver(cuda::CudaDevice* device) : device_(device) {}
  ~PhaseObserver() override {
    for (const Mark& mark : marks_) cudaEventDestroy(mark.event);
  }

  void OnProgress(uint64_t step, StepPhase phase, const std::string&) override {
    if (step <= kColdSteps || (!marks_.empty() && marks_.back().phase == phase)) return;
    Put(phase);
  }
  void OnStep(const v1::StepRecord& record) override {
    if (record.step() <= kColdSteps) return;
    seconds_.push_back(record.seconds());
  }

  double MedianSeconds() {
    std::sort(seconds_.begin(), seconds_.end());
    return seconds_.empty() ? 0 : seconds_[seconds_.size() / 2];
  }
  // Means of the steps, in seconds. After the device has done everything.
  absl::StatusOr<std::array<double, kStepPhases>> Phases() {
    Put(StepPhase::kBarrier);  // the end of the last one
    ZS_RETURN_IF_ERROR(failed_);
    std::array<double, kStepPhases> sums{};
    ZS_RETURN_IF_ERROR(ZS_CUDA_CALL(cudaEventSynchronize(marks_.back().event)));
    for (size_t i = 0; i + 1 < marks_.size(); ++i) {
      float milliseconds = 0;
      ZS_RETURN_IF_ERROR(
          ZS_CUDA_CALL(cudaEventElapsedTime(&milliseconds, marks_[i].event, marks_[i + 1].event)));
      sums[static_cast<size_t>(marks_[i].phase)] +=
          1e-3 * milliseconds / static_cast<double>(std::max<size_t>(seconds_.size(), 1));
    }
    return sums;
  }

 private:
  struct Mark {
    StepPhase phase;
    cudaEvent_t event;
  };

  void Put(StepPhase phase) {
    Mark mark{phase, nullptr};
    absl::Status status = ZS_CUDA_CALL(cudaEventCreate(&mark.event));
    const auto stream = device_->compute()->handle();
    if (status.ok()) status = stream.status();
    if (status.ok()) status = ZS_CUDA_CALL(cudaEventRecord(mark.event, *stream));
    if (!status.ok()) {
      failed_.Update(status);
      return;
    }
    marks_.push_back(mark);
  }

  cuda::CudaDevice* const device_;
  std::vector<Mark> marks_;
  std::vector<double> seconds_;
  absl::Status failed_;
};

struct Model {
  std::string name, text;
  int most_micro_batch;
};

std::string Llama(int blocks) {
  return absl::StrFormat(
      "architecture: llama, hidden_size: 4096, layers: %d, heads: 32, kv_heads: 32, "
      "intermediate_size: 11008, sequence_length: 2048, vocab_size: 32000, tie_embeddings: false",
      blocks);
}

double FreeBytes() {
  size_t free = 0, total = 0;
  return cudaMemGetInfo(&free, &total) == cudaSuccess ? static_cast<double>(free) : 0;
}

double PlannedBytes(const RankPlan& plan) {
  return static_cast<double>(plan.parameters + plan.gradients + plan.optimizer + plan.activations);
}

// Room for what the planner does not predict: staging, scratch, cuBLASLt's workspace.
constexpr double kShareForPlan = 0.9;

bool Fits(const std::string& model, int micro_batch) {
  const auto spec = MakeJob(model, micro_batch, 3);
  if (!spec.ok()) return false;
  const auto plan = PlanOf(*spec);
  return plan.ok() && PlannedBytes(*plan) <= kShareForPlan * FreeBytes();
}

double OperationsOfAToken(const v1::JobSpec& spec) {
  const ModelTable table = *MakeModelTable(spec.model());
  const ModelConfig& c = table.config;
  double in_products = static_cast<double>(table.ParameterCount());
  if (c.architecture == Architecture::kGpt2)
    in_products -= static_cast<double>(c.positions * c.hidden);
  if (!c.tied) in_products -= static_cast<double>(c.vocab * c.hidden);
  return 6 * in_products + 6.0 * static_cast<double>(c.layers * c.sequence) *
                               static_cast<double>(c.heads * c.head_dim);
}

void AddMemory(const std::string& row, const StepTimes& times, const RankPlan& plan, Table* table) {
  const std::pair<MemoryKind, uint64_t> planned[] = {{MemoryKind::kParameters, plan.parameters},
                                                     {MemoryKind::kGradients, plan.gradients},
                                                     {MemoryKind::kOptimizer, plan.optimizer},
                                                     {MemoryKind::kActivations, plan.activations}};
  const double mib = 1.0 / (1 << 20);
  for (const auto& [kind, bytes] : planned) {
    const auto held = static_cast<uint64_t>(times.held[static_cast<size_t>(kind)]);
    table->Add(row, NameOf(kind), mib * static_cast<double>(held), "MiB");
    if (held != bytes) {
      table->Missing(row, absl::StrCat(NameOf(kind), " as planned"),
                     absl::StrCat("held ", held, " bytes, planned ", bytes));
    }
  }
  table->Add(row, "buffers at most",
             mib * static_cast<double>(times.peak[static_cast<size_t>(MemoryKind::kBuffers)]),
             "MiB");
}

// Halves the micro-batch until it runs: buffers are not planned.
absl::Status MeasureModel(const Model& model, int steps, double peak, Table* table) {
  int micro_batch = model.most_micro_batch;
  while (micro_batch > 1 && !Fits(model.text, micro_batch)) micro_batch /= 2;
  for (; micro_batch >= 1; micro_batch /= 2) {
    ZS_ASSIGN_OR_RETURN(const v1::JobSpec spec, MakeJob(model.text, micro_batch, steps));
    const absl::StatusOr<StepTimes> times = RunJob(spec, nullptr);
    if (absl::IsResourceExhausted(times.status()) && micro_batch > 1) continue;
    ZS_RETURN_IF_ERROR(times.status());
    const double tokens =
        static_cast<double>(micro_batch) * static_cast<double>(spec.model().sequence_length());
    const double rate = OperationsOfAToken(spec) * tokens / times->seconds;
    table->Add(model.name, "micro-batch", micro_batch, "sequences");
    table->Add(model.name, "step", 1e3 * times->seconds, "ms");
    table->Add(model.name, "tokens", tokens / times->seconds, "/s");
    table->Add(model.name, "products and attention", 1e-12 * rate, "TFLOP/s");
    if (peak > 0) table->Add(model.name, "of the peak", 100 * rate / peak, "%");
    for (const StepPhase phase : {StepPhase::kForward, StepPhase::kBackward, StepPhase::kOptimizer,
                                  StepPhase::kCommunication}) {
      table->Add(model.name, NameOf(phase), 1e3 * times->phases[static_cast<size_t>(phase)], "ms");
    }
    ZS_ASSIGN_OR_RETURN(const RankPlan plan, PlanOf(spec));
    AddMemory(model.name, *times, plan, table);
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError("not even one sequence fits");
}

}  // namespace

absl::StatusOr<v1::JobSpec> MakeJob(const std::string& model, int micro_batch, int steps,
                                    const std::vector<std::string>& more) {
  const std::string text = absl::StrFormat(
      R"(
name: bench
model: {%s}
data: {train: [random], tokenizer: tokens}
resources: {workers: 1}
train_batch_size: %d
train_micro_batch_size_per_gpu: %d
steps: %d
seed: 1
scheduler: {type: constant}
gradient_clipping: 1.0
bf16: {enabled: true}
zero_optimization: {stage: 0}
)",
      model, micro_batch, micro_batch, steps);
  ZS_ASSIGN_OR_RETURN(v1::JobSpec spec, ParseJobSpec(text, "gpu_bench", more));
  ZS_RETURN_IF_ERROR(NormaliseJobSpec(&spec));
  return spec;
}

absl::StatusOr<RankPlan> PlanOf(const v1::JobSpec& spec) {
  ZS_ASSIGN_OR_RETURN(const ModelTable model, MakeModelTable(spec.model()));
  return PlanRank(model, MakeZeroPolicy(model, MakeZeroOptions(spec, 1)), 0);
}

absl::StatusOr<StepTimes> RunJob(const v1::JobSpec& spec, std::unique_ptr<StateStore> store) {
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, MakeCudaDevice(0));
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<Ops> ops, MakeCudaOps(device.get()));
  MemoryRendezvous rendezvous;
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> comm,
                      MakeNcclCommunicator(CommunicatorOptions(), &rendezvous, device.get()));
  std::unique_ptr<StateStore> staged;  // goes before the device does
  if (store != nullptr)
    staged = MakeStagedStore(std::move(store), device.get(), DType::kBF16, size_t{1} << 30);
  const RandomTokens data(spec.model().sequence_length(), spec.model().vocab_size());
  TrainerOptions options;
  options.spec = spec;
  options.device = device.get();
  options.ops = ops.get();
  options.comm = comm.get();
  options.data = &data;
  options.store = staged.get();
  PhaseObserver observer(cuda::AsCudaDevice(device.get()));
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer, Trainer::Create(options));
  const std::atomic<bool> stop{false};
  const absl::Status status = trainer->Run(&observer, stop);
  if (!status.ok()) {
    comm->Abort("the run failed");
    if (staged != nullptr) staged->Abort("the run failed");
    return status;
  }
  StepTimes times;
  times.seconds = observer.MedianSeconds();
  ZS_ASSIGN_OR_RETURN(times.phases, observer.Phases());
  for (int kind = 0; kind < kMemoryKinds; ++kind) {
    const auto k = static_cast<size_t>(kind);
    times.held[k] = device->memory().Bytes(static_cast<MemoryKind>(kind));
    times.peak[k] = device->memory().PeakBytes(static_cast<MemoryKind>(kind));
  }
  return times;
}

void MeasureSteps(const StepOptions& options, double peak, Table* table) {
  std::vector<Model> models = {
      {"gpt2 124M",
       "architecture: gpt2, hidden_size: 768, layers: 12, heads: 12, sequence_length: 1024, "
       "vocab_size: 50257",
       32}};
  if (!options.small) {
    models.push_back({"gpt2 1.5B",
                      "architecture: gpt2, hidden_size: 1600, layers: 48, heads: 25, "
                      "sequence_length: 1024, vocab_size: 50257",
                      16});
    int fitting = 32;
    while (fitting > 1 && !Fits(Llama(fitting), 1)) --fitting;
    const int blocks = std::min(options.llama_blocks, fitting);
    const std::string name = absl::StrFormat("llama 7B, %d of its blocks", blocks);
    table->Add(name, "blocks that would fit", fitting, "");
    models.push_back({name, Llama(blocks), 8});
  }
  for (const Model& model : models) {
    const absl::Status status = MeasureModel(model, options.steps, peak, table);
    if (!status.ok()) table->Missing(model.name, "step", status.ToString());
  }
}

}  // namespace zeroshard::gpu_bench
