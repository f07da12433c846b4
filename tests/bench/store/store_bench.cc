// The update of a step against what the machine's memory gives.
//
//   store_bench --millions 50 --threads 2 --rounds 9
//
// AdamW over chunks with bf16 gradients, as a shard store applies a decision, beside a loop that
// does almost no arithmetic over the same bytes with the same threads in the same chunks: 28 bytes
// a parameter (2 of gradient read, three times 4 read and written, 2 of parameters written). Both
// in turns; who comes first alternates.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "common/kernels/init.h"
#include "common/status_macros.h"
#include "shard_store/state/job_state.h"
#include "shard_store/state/memory_chunk.h"
#include "tests/bench/support/rates.h"

namespace zeroshard::store {
namespace {

using bench::Median;
using bench::Now;

struct Options {
  int millions = 50;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  int rounds = 9;
  bool digests = false;
};

// The same reads and writes; the widest vectors that the machine has.
__attribute__((target_clones("arch=skylake-avx512", "avx2", "default"), optimize("O3"))) void Fused(
    int64_t n, const uint16_t* __restrict gradient, float* __restrict master,
    float* __restrict exp_avg, float* __restrict exp_avg_sq, uint16_t* __restrict parameters) {
  for (int64_t i = 0; i < n; ++i) {
    const auto g = static_cast<float>(gradient[i]);
    exp_avg[i] += g;
    exp_avg_sq[i] += g;
    master[i] += g;
    parameters[i] = gradient[i];
  }
}

ModelTable OneTensor(int64_t elements) {
  ModelTable model;
  model.units.resize(1);
  UnitTable& unit = model.units[0];
  unit.name = "unit";
  unit.length = elements;
  ParameterInfo tensor;
  tensor.name = "tensor";
  tensor.shape = {elements};
  tensor.size = elements;
  tensor.decay = true;
  tensor.init = InitKind::kNormal;
  tensor.init_std = 0.02f;
  unit.parameters.push_back(tensor);
  return model;
}

absl::Status Run(const Options& options) {
  const int64_t elements = RoundUp(int64_t{options.millions} * 1'000'000, kChunkElements);
  const ModelTable model = OneTensor(elements);
  const std::vector<Chunk> table = ChunkTable::Make(model).chunks;
  TaskPool pool(options.threads);
  MemoryBudget budget(uint64_t{1} << 62);

  JobStateOptions job;
  job.spec.set_name("bench");
  job.spec.mutable_bf16()->set_enabled(true);
  job.spec.mutable_optimizer()->set_type("AdamW");
  v1::OptimizerParams* params = job.spec.mutable_optimizer()->mutable_params();
  params->add_betas(0.9);
  params->add_betas(0.999);
  params->set_eps(1e-8);
  params->set_weight_decay(0.1);
  job.model = &model;
  job.digests = options.digests;
  job.budget = &budget;
  job.pool = &pool;
  std::vector<uint32_t> ids;
  for (const Chunk& chunk : table) {
    ids.push_back(static_cast<uint32_t>(ids.size()));
    job.chunks.emplace(ids.back(), chunk);
  }
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<JobState> state, JobState::Create(job));
  const FreshWeights fresh(1);
  ZS_RETURN_IF_ERROR(state->Fill({&fresh, nullptr, nullptr}, ids, nullptr, nullptr));
  const std::vector<uint16_t> gradient(static_cast<size_t>(kChunkElements), 0x3c00);  // 2^-7
  const absl::Span<const char> bytes[] = {
      {reinterpret_cast<const char*>(gradient.data()), gradient.size() * sizeof(uint16_t)}};
  for (const uint32_t id : ids) ZS_RETURN_IF_ERROR(state->Stage(id, 1, 0, table[id].size(), bytes));

  std::vector<std::shared_ptr<MemoryChunk>> plain;
  for (const uint32_t id : ids) {
    ZS_ASSIGN_OR_RETURN(plain.emplace_back(),
                        DescribeChunk(id, table[id], model, DType::kBF16, {}));
    plain.back()->node = static_cast<int>(id) % pool.nodes();
  }
  ZS_RETURN_IF_ERROR(AllocateChunks(plain, false, "the loop", &budget));

  const auto loop = [&] {
    std::promise<void> done;
    std::atomic<size_t> left = plain.size();
    const double begun = Now();
    for (const auto& chunk : plain) {
      pool.Add(
          [&, c = chunk.get()] {
            Fused(c->size(), c->staging->as<uint16_t>(), c->master->as<float>(),
                  c->exp_avg->as<float>(), c->exp_avg_sq->as<float>(),
                  c->parameters->as<uint16_t>());
            if (--left == 0) done.set_value();
          },
          chunk->node);
    }
    done.get_future().wait();
    return Now() - begun;
  };
  uint64_t step = 0;
  absl::Status applied;
  const auto update = [&] {
    v1::StepDecision decision;
    decision.set_step(++step);
    decision.set_adam_step(step);
    decision.set_multiplier(1e-3f);
    decision.set_learning_rate(1e-4f);
    std::promise<absl::Status> done;
    const double begun = Now();
    state->Apply(
        decision, [](uint32_t, uint32_t) {},
        [&](const absl::Status& status) { done.set_value(status); });
    applied = done.get_future().get();
    return Now() - begun;
  };

  std::vector<double> loops, updates;
  loop();  // gets its pages
  update();
  for (int round = 0; round < options.rounds; ++round) {
    if (round % 2 == 0) loops.push_back(loop());
    updates.push_back(update());
    if (round % 2 == 1) loops.push_back(loop());
    ZS_RETURN_IF_ERROR(applied);
  }
  const auto print = [&](const char* name, const std::vector<double>& seconds) {
    const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
    const auto count = static_cast<double>(elements);
    std::printf("%-22s %6.1f ms  %5.2f G parameters/s  %5.1f GB/s  (%.1f to %.1f ms)\n", name,
                Median(seconds) * 1e3, count / Median(seconds) / 1e9,
                28 * count / Median(seconds) / 1e9, *least * 1e3, *most * 1e3);
  };
  std::printf("%lld parameters in %zu chunks, %d threads, medians of %d rounds\n",
              static_cast<long long>(elements), table.size(), pool.threads(), options.rounds);
  print("read, modify, write", loops);
  print(options.digests ? "AdamW with digests" : "AdamW", updates);
  std::printf("AdamW reaches %.0f %% of the loop\n", 100 * Median(loops) / Median(updates));
  return absl::OkStatus();
}

}  // namespace
}  // namespace zeroshard::store

int main(int argc, char** argv) {
  zeroshard::store::Options options;
  CLI::App app("The shard store's update against the machine's memory");
  app.add_option("--millions", options.millions, "parameters")->check(CLI::Range(1, 100000));
  app.add_option("--threads", options.threads)->check(CLI::Range(1, 1024));
  app.add_option("--rounds", options.rounds)->check(CLI::Range(1, 1000));
  app.add_flag("--digests", options.digests, "As with replicas: a checksum of each chunk");
  CLI11_PARSE(app, argc, argv);
  if (const absl::Status status = zeroshard::store::Run(options); !status.ok()) {
    std::fprintf(stderr, "store_bench: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}
