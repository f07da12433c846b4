// A step of a GPT-2 on two ranks, each with one core: a pipeline of two and a tensor group of two
// beside two data-parallel ranks, on the same global batch, in turns; what of the difference the
// bubble explains (counted from the schedule, and measured as waiting for the other stage) and what
// the bytes at the collective rate that is measured in the same run; then the tensor forward beyond
// its products and sums. `mesh_bench --help` says what can be chosen.
#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/plan/mesh.h"
#include "common/spec/job_spec.h"
#include "tests/bench/mesh/tensor_forward.h"
#include "tests/bench/mesh/two_ranks.h"
#include "tests/bench/support/rates.h"
#include "worker/train/trainer.h"

namespace zeroshard::bench {
namespace {

struct Options {
  int hidden = 512, layers = 8, heads = 8, sequence = 256, vocab = 8192;
  int batch = 8, micro_batch = 1;
  int steps = 4, rounds = 3;
  int stage = 1;
  bool bf16 = false;
};

// The first step touches memory for the first time and creates products.
constexpr uint64_t kColdSteps = 1;

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
      tokens[static_cast<size_t>(i)] = static_cast<int32_t>((state >> 8) % vocab_);
      targets[static_cast<size_t>(i)] = static_cast<int32_t>((state >> 4) % vocab_);
    }
  }

 private:
  const int64_t sequence_, vocab_;
};

v1::JobSpec SpecOf(const Options& o, const MeshShape& shape) {
  const std::string text = absl::StrFormat(
      R"(
name: bench
model: {architecture: gpt2, hidden_size: %d, layers: %d, heads: %d, sequence_length: %d,
        vocab_size: %d}
data: {train: [random], tokenizer: tokens}
resources: {workers: %d}
train_batch_size: %d
train_micro_batch_size_per_gpu: %d
steps: %d
optimizer: {type: AdamW, params: {lr: 1.0e-4}}
bf16: {enabled: %s}
zero_optimization: {stage: %d}
)",
      o.hidden, o.layers, o.heads, o.sequence, o.vocab, shape.Ranks(), o.batch, o.micro_batch,
      o.steps + static_cast<int>(kColdSteps), o.bf16 ? "true" : "false", o.stage);
  v1::JobSpec spec = Must(ParseJobSpec(text, "mesh_bench", {}));
  Must(NormaliseJobSpec(&spec));
  spec.mutable_parallel()->set_tensor(static_cast<uint32_t>(shape.tensor));
  spec.mutable_parallel()->set_pipeline(static_cast<uint32_t>(shape.pipeline));
  return spec;
}

struct Measured {
  std::vector<double> seconds;  // of warm steps
  double stage_wait = 0;        // share of all time, of all ranks
  double phases = 0, waits = 0;
  BubbleShares bubble;
};

class Steps : public TrainObserver {
 public:
  Steps(Measured* out, const TrainCounters* counters) : out_(*out), counters_(*counters) {}
  void OnProgress(uint64_t, StepPhase, const std::string&) override {}
  void OnStep(const v1::StepRecord& record) override {
    if (record.step() > kColdSteps) out_.seconds.push_back(record.seconds());
    if (record.step() == kColdSteps) phases_ = Phases(), waits_ = Waits();
  }
  double Phases() const {
    double sum = 0;
    for (const auto& phase : counters_.phase_nanoseconds) sum += static_cast<double>(phase.load());
    return sum * 1e-9;
  }
  double Waits() const {
    return static_cast<double>(counters_.pipeline_wait_nanoseconds.load()) * 1e-9;
  }
  void Finish() {
    out_.phases += Phases() - phases_;
    out_.waits += Waits() - waits_;
  }

 private:
  Measured& out_;
  const TrainCounters& counters_;
  double phases_ = 0, waits_ = 0;
};

// Appends what both ranks measured.
void Train(const Options& o, const MeshShape& shape, Measured* out) {
  const v1::JobSpec spec = SpecOf(o, shape);
  const RandomTokens data(o.sequence, o.vocab);
  MemoryRendezvous rendezvous;
  Measured ranks[2];
  OnTwoRanks([&](int rank) {
    RankLines lines = Connect(shape, rank, &rendezvous);
    const std::unique_ptr<Ops> ops = MakeCpuOps(1);
    TrainerOptions options;
    options.spec = spec;
    options.device = lines.device.get();
    options.ops = ops.get();
    options.comm = lines.data.get();
    options.mesh.shape = shape;
    if (shape.pipeline > 1) options.mesh.pipeline = lines.pipeline.get();
    if (shape.tensor > 1) options.mesh.tensor = lines.tensor.get();
    options.mesh.job = lines.job.get();
    options.data = &data;
    options.job = "bench";
    options.run_id = "bench-1";
    const std::unique_ptr<Trainer> trainer = Must(Trainer::Create(options));
    Steps steps(&ranks[rank], &trainer->counters());
    const std::atomic<bool> stop{false};
    Must(trainer->Run(&steps, stop));
    steps.Finish();
    ranks[rank].bubble = trainer->bubble();
  });
  out->seconds.insert(out->seconds.end(), ranks[0].seconds.begin(), ranks[0].seconds.end());
  for (const Measured& rank : ranks) {
    out->phases += rank.phases;
    out->waits += rank.waits;
  }
  out->stage_wait = out->phases > 0 ? out->waits / out->phases : 0;
  out->bubble = ranks[0].bubble;
}

// Bytes of a step that the busier rank sends, by what for.
void PrintTraffic(const Options& o, const MeshShape& shape, double rate, double step) {
  const v1::JobSpec spec = SpecOf(o, shape);
  const std::vector<RankPlan> plans =
      Must(PlanRanks(spec, Must(MakeModelTable(spec.model())), shape.Ranks()));
  double most = 0;
  for (const RankPlan& plan : plans) most = std::max(most, static_cast<double>(plan.StepBytes()));
  std::printf("    %.1f MB sent a step: %.1f ms at %.2f GB/s, %.1f %% of the step\n", most * 1e-6,
              1e3 * most / rate, rate * 1e-9, 100 * most / rate / step);
}

int Run(const Options& o) {
  struct Kind {
    const char* name;
    MeshShape shape;
    Measured measured;
  };
  Kind kinds[] = {{"data 2", {.pipeline = 1, .data = 2, .tensor = 1}, {}},
                  {"tensor 2", {.pipeline = 1, .data = 1, .tensor = 2}, {}},
                  {"pipeline 2", {.pipeline = 2, .data = 1, .tensor = 1}, {}}};
  const v1::JobSpec spec = SpecOf(o, kinds[0].shape);
  const ModelTable model = Must(MakeModelTable(spec.model()));
  const DType type = o.bf16 ? DType::kBF16 : DType::kF32;
  std::printf(
      "GPT-2 of %.1f M parameters, %d x %d tokens a step, micro-batches of %d, stage %d, %s\n",
      static_cast<double>(model.ParameterCount()) * 1e-6, o.batch, o.sequence, o.micro_batch,
      o.stage, o.bf16 ? "bf16" : "fp32");
  for (int round = 0; round < o.rounds; ++round) {
    for (int i = 0; i < 3; ++i) {
      Kind& kind = kinds[(round + i) % 3];
      Train(o, kind.shape, &kind.measured);
    }
  }
  const TensorForward forward = MeasureTensorForward(model, o.micro_batch, type, 3 * o.rounds);
  const double rate = forward.sum_bytes_a_second;
  const double data = Median(kinds[0].measured.seconds);
  for (const Kind& kind : kinds) {
    const double step = Median(kind.measured.seconds);
    std::printf("%-10s  %8.1f ms a step, %7.0f tokens/s, %.3f of data 2's\n", kind.name, 1e3 * step,
                o.batch * o.sequence / step, data / step);
    if (kind.shape.pipeline > 1)
      std::printf(
          "    idle: %.1f %% by (p-1)/(m+p-1), %.1f %% counted from the schedule, %.1f %% measured "
          "waiting for the other stage\n",
          100 * kind.measured.bubble.predicted, 100 * kind.measured.bubble.counted,
          100 * kind.measured.stage_wait);
    PrintTraffic(o, kind.shape, rate, step);
  }
  std::printf(
      "tensor forward of a micro-batch through %d blocks: %.2f ms, products %.2f\n"
      "    sums one after the other %.2f ms (%.2f GB/s): %.1f %% beyond products and them\n"
      "    sums between computations %.2f ms (%.2f GB/s): %.1f %% beyond products and them\n",
      o.layers, 1e3 * forward.split, 1e3 * forward.split_products, 1e3 * forward.sums, rate * 1e-9,
      100 * forward.Extra(forward.sums), 1e3 * forward.sums_apart,
      rate * 1e-9 * forward.sums / forward.sums_apart, 100 * forward.Extra(forward.sums_apart));
  std::printf(
      "    one rank alone: %.2f ms, products %.2f, %.1f %% beyond them; split beyond half of it "
      "and "
      "sums: %.1f %%\n",
      1e3 * forward.whole, 1e3 * forward.whole_products,
      100 * (forward.whole - forward.whole_products) / forward.whole, 100 * forward.BeyondHalf());
  return 0;
}

}  // namespace
}  // namespace zeroshard::bench

int main(int argc, char** argv) {
  zeroshard::bench::Options o;
  CLI::App app{"A pipeline of two and a tensor group of two beside two data-parallel ranks"};
  app.add_option("--hidden", o.hidden)->capture_default_str();
  app.add_option("--layers", o.layers)->capture_default_str();
  app.add_option("--heads", o.heads)->capture_default_str();
  app.add_option("--sequence", o.sequence)->capture_default_str();
  app.add_option("--vocab", o.vocab)->capture_default_str();
  app.add_option("--batch", o.batch, "Sequences of a step")->capture_default_str();
  app.add_option("--micro-batch", o.micro_batch)->capture_default_str();
  app.add_option("--steps", o.steps, "Warm ones, of each mesh and round")->capture_default_str();
  app.add_option("--rounds", o.rounds)->capture_default_str();
  app.add_option("--stage", o.stage, "Of ZeRO")->capture_default_str();
  app.add_flag("--bf16", o.bf16);
  CLI11_PARSE(app, argc, argv);
  return zeroshard::bench::Run(o);
}
