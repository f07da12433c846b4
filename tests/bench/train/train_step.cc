// Seconds a training step of GPT-2 with 124 M parameters takes, at each ZeRO stage, with ranks as
// processes of this machine, beside the machine's own matrix-product peak measured by the same
// processes in the same run. `train_step --help` says what can be chosen.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/plan/planner.h"
#include "common/spec/job_spec.h"
#include "tests/worker/comm/file_rendezvous.h"
#include "worker/train/trainer.h"

namespace zeroshard {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::vector<int> sequences = {128, 512};
  std::vector<int> ranks = {1, 2};
  std::vector<int> stages = {0, 1, 2, 3};
  int threads = 1;
  int steps = 6;
  int micro_batch = 1;
  bool fp32 = false;
  std::vector<std::string> set;
};

// What one rank measured; lives in memory that the processes share.
struct Measured {
  bool ok = false;
  double step_seconds = 0;     // median after the first two steps
  double matmul_seconds = 0;   // of a step, mean
  double compute_seconds = 0;  // of a step, mean: forward and backward without waiting
  double wait_seconds = 0;     // of a step, mean: waiting for communication
  double optimizer_seconds = 0;
  double peak_flops = 0;
  double bytes_sent = 0;  // of a step
  double state_bytes = 0;
  double peak_rss = 0;
};

double Since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "train_step: %s\n", status.ToString().c_str());
  std::_Exit(1);
}

// Random tokens: the time does not depend on them.
class RandomTokens : public TokenDataset {
 public:
  explicit RandomTokens(int64_t sequence) : sequence_(sequence) {}
  int64_t token_count() const override { return sequence_ * 4096 + 1; }
  int64_t sample_count() const override { return 4096; }
  void Sample(int64_t index, absl::Span<int32_t> tokens,
              absl::Span<int32_t> targets) const override {
    uint32_t state = static_cast<uint32_t>(index) * 2654435761u + 1;
    for (int64_t i = 0; i < sequence_; ++i) {
      state = state * 1664525u + 1013904223u;
      tokens[static_cast<size_t>(i)] = static_cast<int32_t>(state % 50257);
      targets[static_cast<size_t>(i)] = static_cast<int32_t>((state >> 8) % 50257);
    }
  }

 private:
  const int64_t sequence_;
};

class StepTimes : public TrainObserver {
 public:
  void OnProgress(uint64_t, StepPhase, const std::string&) override {}
  void OnStep(const v1::StepRecord& record) override { seconds.push_back(record.seconds()); }
  std::vector<double> seconds;
};

// Products per second of the best of a few large shapes, while the other ranks do the same.
double ProductPeak(Ops* ops, DType type) {
  double best = 0;
  for (int64_t n : {768, 1536, 3072}) {
    const int64_t m = 512, k = 768;
    std::vector<char> a(static_cast<size_t>(m * k) * 4), b(static_cast<size_t>(n * k) * 4),
        c(static_cast<size_t>(m * n) * 4);
    MatmulArgs args;
    args.a = a.data();
    args.b = b.data();
    args.c = c.data();
    args.m = m;
    args.n = n;
    args.k = k;
    args.transpose_b = true;
    args.ab_type = args.c_type = type;
    for (int i = 0; i < 30; ++i) {
      const auto start = Clock::now();
      Must(ops->Matmul(args));
      best = std::max(best, 2.0 * static_cast<double>(m * n * k) / Since(start));
    }
  }
  return best;
}

double PeakResidentBytes() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind("VmHWM:", 0) == 0) return std::strtod(line.c_str() + 6, nullptr) * 1024;
  }
  return 0;
}

v1::JobSpec Spec(const Options& options, int sequence, int ranks, int stage) {
  const std::string text = absl::StrFormat(
      R"(
name: bench
model: {architecture: gpt2, hidden_size: 768, layers: 12, heads: 12, sequence_length: %d,
        vocab_size: 50257}
data: {train: [random], tokenizer: tokens}
resources: {workers: %d}
train_batch_size: %d
train_micro_batch_size_per_gpu: %d
steps: %d
seed: 1
scheduler: {type: constant}
gradient_clipping: 1.0
bf16: {enabled: %s}
zero_optimization: {stage: %d, stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0,
                    stage3_prefetch_bucket_size: 8000000}
)",
      sequence, ranks, ranks * options.micro_batch, options.micro_batch, options.steps,
      options.fp32 ? "false" : "true", stage);
  auto spec = ParseJobSpec(text, "train_step", options.set);
  Must(spec.status());
  Must(NormaliseJobSpec(&*spec));
  return *spec;
}

void RunRank(const Options& options, const v1::JobSpec& spec, int rank, int ranks,
             const std::string& folder, Measured* out) {
  std::unique_ptr<Device> device = MakeCpuDevice();
  std::unique_ptr<Ops> ops = MakeCpuOps(options.threads);
  FileRendezvous rendezvous(folder);
  GlooOptions gloo;
  gloo.rank = rank;
  gloo.size = ranks;
  gloo.host = "127.0.0.1";
  auto comm = MakeGlooCommunicator(gloo, &rendezvous, device.get());
  Must(comm.status());
  Must((*comm)->Barrier({}).Wait());
  out->peak_flops = ProductPeak(ops.get(), options.fp32 ? DType::kF32 : DType::kBF16);
  Must((*comm)->Barrier({}).Wait());

  const RandomTokens data(spec.model().sequence_length());
  TrainerOptions trainer_options;
  trainer_options.spec = spec;
  trainer_options.device = device.get();
  trainer_options.ops = ops.get();
  trainer_options.comm = comm->get();
  trainer_options.data = &data;
  auto trainer = Trainer::Create(trainer_options);
  Must(trainer.status());
  const double matmul_before = ops->MatmulSeconds();
  StepTimes times;
  const std::atomic<bool> stop{false};
  Must((*trainer)->Run(&times, stop));

  const double steps = static_cast<double>(spec.steps());
  const auto phase = [&](StepPhase p) {
    return 1e-9 *
           static_cast<double>(
               (*trainer)->counters().phase_nanoseconds[static_cast<size_t>(p)].load()) /
           steps;
  };
  std::vector<double> warm(times.seconds.begin() + std::min<long>(2, options.steps - 1),
                           times.seconds.end());
  std::sort(warm.begin(), warm.end());
  out->step_seconds = warm[warm.size() / 2];
  out->matmul_seconds = (ops->MatmulSeconds() - matmul_before) / steps;
  out->compute_seconds = phase(StepPhase::kForward) + phase(StepPhase::kBackward);
  out->wait_seconds = phase(StepPhase::kCommunication);
  out->optimizer_seconds = phase(StepPhase::kOptimizer);
  for (int op = 0; op < kCollectiveOps; ++op)
    for (int p = 0; p < kPhases; ++p)
      out->bytes_sent += static_cast<double>((*comm)->traffic().Get(static_cast<CollectiveOp>(op),
                                                                    static_cast<Phase>(p))) /
                         steps;
  for (MemoryKind kind : {MemoryKind::kParameters, MemoryKind::kGradients, MemoryKind::kOptimizer})
    out->state_bytes += static_cast<double>(device->memory().Bytes(kind));
  out->peak_rss = PeakResidentBytes();
  out->ok = true;
}

// Matrix-product operations of one step on one rank.
double StepFlops(int sequence, int micro_batch) {
  const double c = 768, layers = 12, vocab = 50257;
  const double per_token = 2 * (layers * 12 * c * c + vocab * c);
  return 3 * per_token * sequence * micro_batch;  // forward, and two products in backward
}

int Run(const Options& options) {
  std::printf(
      "GPT-2 124 M, %s, micro-batch %d, %d thread(s) a rank. products: the step's products at this "
      "run's peak;\nratio: forward and backward over that; MiB and GB/s are 2^20 and 10^9 bytes.\n",
      options.fp32 ? "fp32" : "bf16", options.micro_batch, options.threads);
  std::printf("%4s %5s %5s | %7s %8s | %7s %7s %7s %7s | %8s %6s %5s | %8s | %7s %7s\n", "seq",
              "ranks", "stage", "step s", "tokens/s", "compute", "wait", "optim", "matmul",
              "products", "ratio", "share", "sent MiB", "state", "peak");
  auto* shared = static_cast<Measured*>(mmap(nullptr, 64 * sizeof(Measured), PROT_READ | PROT_WRITE,
                                             MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  for (int sequence : options.sequences) {
    for (int ranks : options.ranks) {
      for (int stage : options.stages) {
        const v1::JobSpec spec = Spec(options, sequence, ranks, stage);
        std::string folder =
            (std::filesystem::temp_directory_path() / "train_step.XXXXXX").string();
        if (mkdtemp(folder.data()) == nullptr) Must(absl::InternalError("no temporary folder"));
        std::fflush(stdout);
        std::vector<pid_t> children;
        for (int rank = 0; rank < ranks; ++rank) {
          shared[rank] = Measured();
          const pid_t child = fork();
          if (child == 0) {
            RunRank(options, spec, rank, ranks, folder, &shared[rank]);
            std::_Exit(0);
          }
          children.push_back(child);
        }
        for (pid_t child : children) waitpid(child, nullptr, 0);
        std::filesystem::remove_all(folder);
        Measured worst = shared[0];
        for (int rank = 0; rank < ranks; ++rank) {
          if (!shared[rank].ok) return 1;
          worst.step_seconds = std::max(worst.step_seconds, shared[rank].step_seconds);
          worst.peak_rss = std::max(worst.peak_rss, shared[rank].peak_rss);
          worst.state_bytes = std::max(worst.state_bytes, shared[rank].state_bytes);
        }
        const double products = StepFlops(sequence, options.micro_batch) / worst.peak_flops;
        const double mib = 1.0 / (1 << 20);
        std::printf(
            "%4d %5d %5d | %7.3f %8.0f | %7.3f %7.3f %7.3f %7.3f | %8.3f %6.2f %4.0f%% | %8.1f | "
            "%7.0f %7.0f   (%.0f GFLOP/s peak a rank)\n",
            sequence, ranks, stage, worst.step_seconds,
            sequence * ranks * options.micro_batch / worst.step_seconds, worst.compute_seconds,
            worst.wait_seconds, worst.optimizer_seconds, worst.matmul_seconds, products,
            worst.compute_seconds / products, 100 * worst.matmul_seconds / worst.step_seconds,
            worst.bytes_sent * mib, worst.state_bytes * mib, worst.peak_rss * mib,
            worst.peak_flops * 1e-9);
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) {
  zeroshard::Options options;
  CLI::App app{"Time a training step of GPT-2 (124 M parameters) at each ZeRO stage."};
  app.add_option("--sequence", options.sequences, "tokens a sequence")->delimiter(',');
  app.add_option("--ranks", options.ranks, "ranks, each a process")->delimiter(',');
  app.add_option("--stages", options.stages, "ZeRO stages")->delimiter(',');
  app.add_option("--threads", options.threads, "threads of a rank");
  app.add_option("--steps", options.steps, "steps a configuration; the first two are not timed");
  app.add_option("--micro-batch", options.micro_batch, "sequences a rank and step");
  app.add_flag("--fp32", options.fp32, "fp32 instead of bf16");
  app.add_option("--set", options.set, "override a key of the job, key.path=value");
  CLI11_PARSE(app, argc, argv);
  if (options.steps < 3) options.steps = 3;
  return zeroshard::Run(options);
}
