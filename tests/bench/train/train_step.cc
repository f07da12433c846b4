// Seconds a training step of GPT-2 with 124 M parameters takes, at each ZeRO stage, with ranks as
// processes of this machine, beside the machine's own matrix-product peak measured by the same
// processes in the same run; with --checkpoint also what saving costs; with --offload the same step
// with the optimizer state in a shard store, a process of this machine too, beside the one without,
// in turns. `train_step --help` says what can be chosen.
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
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/bulk/transport/channel_arguments.h"
#include "common/member/cluster_client.h"
#include "common/plan/offload.h"
#include "common/plan/planner.h"
#include "common/spec/job_spec.h"
#include "tests/bench/support/rates.h"
#include "tests/bench/train/store_process.h"
#include "tests/worker/comm/file_rendezvous.h"
#include "worker/agent/store_client.h"
#include "worker/train/trainer.h"

namespace zeroshard {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostRanks = 64;

struct Options {
  std::vector<int> sequences = {128, 512};
  std::vector<int> ranks = {1, 2};
  std::vector<int> stages = {0, 1, 2, 3};
  int threads = 1;
  int steps = 8;
  int micro_batch = 1;
  bool fp32 = false;
  std::string checkpoint;  // folder; empty: none are written
  int interval = 4;        // steps between two
  bool offload = false;    // compare with and without
  int rounds = 3;          // of that
  int store_threads = static_cast<int>(std::thread::hardware_concurrency());
  std::vector<std::string> set;
};

// What one rank measured; lives in memory that the processes share.
struct Measured {
  bool ok = false;
  double step_seconds = 0;     // median of the warm steps; what follows are their means
  double matmul_seconds = 0;   // in products
  double compute_seconds = 0;  // forward and backward without waiting
  double wait_seconds = 0;     // for communication
  double optimizer_seconds = 0;
  double offload_seconds = 0;                 // waiting for the store
  double pushed_bytes = 0, pulled_bytes = 0;  // of a step
  double peak_flops = 0;
  double bytes_sent = 0;  // of a step
  double state_bytes = 0;
  double peak_rss = 0;
  // Of checkpoints, on rank 0: means over those that were complete.
  int checkpoints = 0;
  double pause_seconds = 0, save_seconds = 0, checkpoint_bytes = 0;
  double saving_step_seconds = 0;  // of the steps right after one began
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

// The first steps touch memory for the first time and create products: they are not counted.
constexpr uint64_t kColdSteps = 2;

// Seconds a step, and what the warm steps spent where.
class StepTimes : public TrainObserver {
 public:
  // `interval`: steps between two checkpoints; 0: none.
  StepTimes(const TrainCounters* counters, const Ops* ops, uint64_t interval)
      : counters_(*counters), ops_(*ops), interval_(interval) {}
  void OnCheckpoint(const v1::CheckpointRecord& record) override {
    if (!record.complete()) Must(absl::InternalError(record.message()));
    saves.push_back(record);
  }
  std::vector<v1::CheckpointRecord> saves;
  double SavingStep() const {
    double sum = 0;
    for (double seconds : saving_) sum += seconds;
    return saving_.empty() ? 0 : sum / static_cast<double>(saving_.size());
  }
  void OnProgress(uint64_t, StepPhase, const std::string&) override {}
  void OnStep(const v1::StepRecord& record) override {
    if (record.step() > kColdSteps)
      (interval_ > 0 && record.step() % interval_ == 1 ? saving_ : seconds_)
          .push_back(record.seconds());
    if (record.step() != kColdSteps) return;
    for (int p = 0; p < kStepPhases; ++p) before_[p] = Nanoseconds(p);
    matmul_before_ = ops_.MatmulSeconds();
  }
  double Median() const { return bench::Median(seconds_); }  // beside no save
  // Means of the warm steps.
  double Phase(StepPhase phase) const {
    const int p = static_cast<int>(phase);
    return 1e-9 * static_cast<double>(Nanoseconds(p) - before_[p]) / Count();
  }
  double Matmul() const { return (ops_.MatmulSeconds() - matmul_before_) / Count(); }

 private:
  uint64_t Nanoseconds(int phase) const {
    return counters_.phase_nanoseconds[static_cast<size_t>(phase)].load();
  }
  double Count() const { return static_cast<double>(seconds_.size() + saving_.size()); }

  const TrainCounters& counters_;
  const Ops& ops_;
  const uint64_t interval_;
  std::vector<double> seconds_, saving_;
  uint64_t before_[kStepPhases] = {};
  double matmul_before_ = 0;
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

v1::JobSpec Spec(const Options& options, int sequence, int ranks, int stage, bool offload) {
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
  std::vector<std::string> set = options.set;
  if (offload) set.push_back("zero_optimization.offload_optimizer.device=cpu");
  auto spec = ParseJobSpec(text, "train_step", set);
  Must(spec.status());
  if (!options.checkpoint.empty()) {
    spec->mutable_checkpoint()->set_dir(
        absl::StrFormat("%s/%d-%d-%d", options.checkpoint, sequence, ranks, stage));
    spec->mutable_checkpoint()->set_interval_steps(static_cast<uint64_t>(options.interval));
    spec->mutable_checkpoint()->set_keep_last(1);
  }
  Must(NormaliseJobSpec(&*spec));
  return *spec;
}

// `store`: where the state of an offloaded job is; else null.
void RunRank(const Options& options, const v1::JobSpec& spec, const bench::StoreProcess* store,
             int rank, int ranks, const std::string& folder, Measured* out) {
  if (store != nullptr) bulk::KeepReceiveMemory();
  std::unique_ptr<Device> device = MakeCpuDevice();
  std::unique_ptr<Ops> ops = MakeCpuOps(options.threads);
  FileRendezvous rendezvous(folder);
  CommunicatorOptions gloo;
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
  std::unique_ptr<ClusterClient> cluster;
  std::unique_ptr<StoreClient> client;
  if (store != nullptr) {
    cluster = std::make_unique<ClusterClient>(store->address());
    const v1::Assign assign = store->Assignment(rank, ranks);
    v1::Fence fence;
    fence.set_member("worker-" + std::to_string(rank));
    fence.set_run_id(assign.run_id());
    fence.set_generation(assign.generation());
    fence.set_rank(assign.rank());
    auto client_options = StoreClientOptions::Of(assign, fence);
    Must(client_options.status());
    client_options->client = cluster.get();
    auto opened = StoreClient::Open(*std::move(client_options));
    Must(opened.status());
    client = *std::move(opened);
    trainer_options.store = client.get();
  }
  auto trainer = Trainer::Create(trainer_options);
  Must(trainer.status());
  StepTimes times(&(*trainer)->counters(), ops.get(), spec.checkpoint().interval_steps());
  const std::atomic<bool> stop{false};
  Must((*trainer)->Run(&times, stop));

  const double steps = static_cast<double>(spec.steps());
  out->step_seconds = times.Median();
  out->matmul_seconds = times.Matmul();
  out->compute_seconds = times.Phase(StepPhase::kForward) + times.Phase(StepPhase::kBackward);
  out->wait_seconds = times.Phase(StepPhase::kCommunication);
  out->optimizer_seconds = times.Phase(StepPhase::kOptimizer);
  out->offload_seconds = times.Phase(StepPhase::kOffload);
  if (client != nullptr) {
    out->pushed_bytes = static_cast<double>(client->counters().pushed) / steps;
    out->pulled_bytes = static_cast<double>(client->counters().pulled) / steps;
  }
  for (int op = 0; op < kCollectiveOps; ++op)
    for (int p = 0; p < kPhases; ++p)
      out->bytes_sent += static_cast<double>((*comm)->traffic().Get(static_cast<CollectiveOp>(op),
                                                                    static_cast<Phase>(p))) /
                         steps;
  for (MemoryKind kind : {MemoryKind::kParameters, MemoryKind::kGradients, MemoryKind::kOptimizer})
    out->state_bytes += static_cast<double>(device->memory().Bytes(kind));
  out->peak_rss = PeakResidentBytes();
  out->saving_step_seconds = times.SavingStep();
  out->checkpoints = static_cast<int>(times.saves.size());
  for (const v1::CheckpointRecord& save : times.saves) {
    out->pause_seconds += save.pause_seconds() / out->checkpoints;
    out->save_seconds += save.seconds() / out->checkpoints;
    out->checkpoint_bytes = static_cast<double>(save.bytes());
  }
  out->ok = true;
}

// Matrix-product operations of one step on one rank.
double StepFlops(int sequence, int micro_batch) {
  const double c = 768, layers = 12, vocab = 50257;
  const double per_token = 2 * (layers * 12 * c * c + vocab * c);
  return 3 * per_token * sequence * micro_batch;  // forward, and two products in backward
}

// Ranks as processes, and for an offloaded job a store. Of the ranks' measurements the first one's,
// with the largest step and memory; nothing where a rank failed.
std::optional<Measured> RunOnce(const Options& options, const v1::JobSpec& spec, int ranks) {
  static auto* const shared =
      static_cast<Measured*>(mmap(nullptr, kMostRanks * sizeof(Measured), PROT_READ | PROT_WRITE,
                                  MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::string folder = (std::filesystem::temp_directory_path() / "train_step.XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) Must(absl::InternalError("no temporary folder"));
  std::fflush(stdout);
  std::unique_ptr<bench::StoreProcess> store;
  if (IsOffloaded(spec)) {
    auto started = bench::StoreProcess::Start(spec, options.store_threads, folder);
    Must(started.status());
    store = *std::move(started);
  }
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    shared[rank] = Measured();
    const pid_t child = fork();
    if (child == 0) {
      RunRank(options, spec, store.get(), rank, ranks, folder, &shared[rank]);
      std::_Exit(0);
    }
    children.push_back(child);
  }
  for (pid_t child : children) waitpid(child, nullptr, 0);
  store = nullptr;
  std::filesystem::remove_all(folder);
  Measured worst = shared[0];
  for (int rank = 0; rank < ranks; ++rank) {
    if (!shared[rank].ok) return std::nullopt;
    worst.step_seconds = std::max(worst.step_seconds, shared[rank].step_seconds);
    worst.peak_rss = std::max(worst.peak_rss, shared[rank].peak_rss);
    worst.state_bytes = std::max(worst.state_bytes, shared[rank].state_bytes);
  }
  return worst;
}

// Each round runs both; who comes first alternates.
int Compare(const Options& options) {
  std::printf(
      "GPT-2 124 M, %s, micro-batch %d, %d thread(s) a rank, %d of the store, %u processors. "
      "Median "
      "step of each of %d rounds with the\noptimizer state in the ranks and in a store; medians of "
      "those; MiB a rank and step.\n",
      options.fp32 ? "fp32" : "bf16", options.micro_batch, options.threads, options.store_threads,
      std::thread::hardware_concurrency(), options.rounds);
  std::printf("%4s %5s %5s | %9s %9s %6s | %8s %8s %8s | %8s %8s\n", "seq", "ranks", "stage",
              "ranks s", "store s", "ratio", "compute", "wait", "offload", "pushed", "pulled");
  for (int sequence : options.sequences) {
    for (int ranks : options.ranks) {
      for (int stage : options.stages) {
        if (stage == 0) continue;  // keeps its state whole in every rank
        std::vector<double> seconds[2];
        Measured last;
        for (int round = 0; round < options.rounds; ++round) {
          for (int turn = 0; turn < 2; ++turn) {
            const bool offload = turn == round % 2;
            const auto measured =
                RunOnce(options, Spec(options, sequence, ranks, stage, offload), ranks);
            if (!measured) return 1;
            seconds[offload ? 1 : 0].push_back(measured->step_seconds);
            if (offload) last = *measured;
          }
        }
        const double without = bench::Median(seconds[0]), with = bench::Median(seconds[1]);
        const double mib = 1.0 / (1 << 20);
        std::printf("%4d %5d %5d | %9.3f %9.3f %6.2f | %8.3f %8.3f %8.3f | %8.1f %8.1f\n", sequence,
                    ranks, stage, without, with, with / without, last.compute_seconds,
                    last.wait_seconds, last.offload_seconds, last.pushed_bytes * mib,
                    last.pulled_bytes * mib);
      }
    }
  }
  return 0;
}

int Run(const Options& options) {
  std::printf(
      "GPT-2 124 M, %s, micro-batch %d, %d thread(s) a rank. products: the step's products at this "
      "run's peak;\nratio: forward and backward over that; MiB and GB/s are 2^20 and 10^9 bytes.\n",
      options.fp32 ? "fp32" : "bf16", options.micro_batch, options.threads);
  std::printf("%4s %5s %5s | %7s %8s | %7s %7s %7s %7s | %8s %6s %5s | %8s | %7s %7s\n", "seq",
              "ranks", "stage", "step s", "tokens/s", "compute", "wait", "optim", "matmul",
              "products", "ratio", "share", "sent MiB", "state", "peak");
  for (int sequence : options.sequences) {
    for (int ranks : options.ranks) {
      for (int stage : options.stages) {
        const v1::JobSpec spec = Spec(options, sequence, ranks, stage, false);
        const std::optional<Measured> measured = RunOnce(options, spec, ranks);
        if (!measured) return 1;
        const Measured& worst = *measured;
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
        if (worst.checkpoints == 0) continue;
        std::printf(
            "%16s | %d checkpoints of %.0f MiB: training stood still %.3f s for each, %.1f %% of "
            "a step; %.2f s until complete, %.0f MiB/s; a step beside a save %.3f s\n",
            "", worst.checkpoints, worst.checkpoint_bytes * mib, worst.pause_seconds,
            100 * worst.pause_seconds / worst.step_seconds, worst.save_seconds,
            worst.checkpoint_bytes * mib / worst.save_seconds, worst.saving_step_seconds);
        std::filesystem::remove_all(spec.checkpoint().dir());
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
  app.add_option("--checkpoint", options.checkpoint, "write checkpoints below this folder");
  app.add_option("--interval", options.interval, "steps between two checkpoints");
  app.add_flag("--offload", options.offload,
               "compare with the optimizer state in a shard store, at stages 1 to 3");
  app.add_option("--rounds", options.rounds, "of that comparison");
  app.add_option("--store-threads", options.store_threads, "threads of the store's updates");
  app.add_option("--set", options.set, "override a key of the job, key.path=value");
  CLI11_PARSE(app, argc, argv);
  options.steps = std::max(options.steps, static_cast<int>(zeroshard::kColdSteps) + 1);
  options.rounds = std::max(options.rounds, 1);
  for (const int ranks : options.ranks) {
    if (ranks >= 1 && ranks <= zeroshard::kMostRanks) continue;
    std::fprintf(stderr, "train_step: --ranks %d; wanted 1 to %d\n", ranks, zeroshard::kMostRanks);
    return 2;
  }
  return options.offload ? zeroshard::Compare(options) : zeroshard::Run(options);
}
