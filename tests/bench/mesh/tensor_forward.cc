#include "tests/bench/mesh/tensor_forward.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "common/plan/activation_table.h"
#include "common/plan/collective_bytes.h"
#include "common/plan/tensor_slices.h"
#include "tests/bench/mesh/two_ranks.h"
#include "tests/bench/support/rates.h"
#include "worker/model/unit.h"

namespace zeroshard::bench {
namespace {

// One rank's blocks with memory of their own.
class Blocks {
 public:
  Blocks(const TensorRank& slice, TensorGroup* group, int64_t micro_batch, DType type)
      : ops_(MakeCpuOps(1)),
        model_(MakeModel(slice, /*checkpointing=*/false, group)),
        config_(slice.model.config),
        type_(type) {
    const ActivationTable table =
        MakeActivationTable(config_, UnitKind::kBlock, micro_batch, type, false);
    boundary_ = micro_batch * config_.sequence * config_.hidden;
    for (size_t b = 0; b < model_.blocks.size(); ++b) {
      parameters_.emplace_back(static_cast<size_t>(slice.model.units[b + 1].length) * SizeOf(type),
                               char{});
      kept_.emplace_back(static_cast<size_t>(table.kept_bytes), char{});
    }
    scratch_.resize(static_cast<size_t>(table.scratch_bytes));
    output_.resize(static_cast<size_t>(boundary_) * SizeOf(type));
    batch_.batch = micro_batch;
  }

  // Seconds of all, and of them those in products.
  std::pair<double, double> Forward() {
    const double products = ops_->MatmulSeconds(), start = Now();
    for (size_t b = 0; b < model_.blocks.size(); ++b) {
      UnitContext context;
      context.ops = ops_.get();
      context.dtype = type_;
      context.kept = kept_[b].data();
      context.scratch = scratch_.data();
      void* y = b + 1 < kept_.size() ? kept_[b + 1].data() : output_.data();
      Must(model_.blocks[b]->Forward(context, parameters_[b].data(), batch_, kept_[b].data(), y));
    }
    const double seconds = Now() - start;
    return {seconds, ops_->MatmulSeconds() - products};
  }
  int64_t boundary() const { return boundary_; }
  size_t count() const { return kept_.size(); }

 private:
  const std::unique_ptr<Ops> ops_;
  Model model_;
  const ModelConfig config_;
  const DType type_;
  int64_t boundary_ = 0;
  std::vector<std::vector<char>> parameters_, kept_;
  std::vector<char> scratch_, output_;
  MicroBatch batch_;
};

// Two sums of [mb*T, C] a block.
double Sums(Communicator* line, const Blocks& blocks, DType type, std::vector<char>* memory) {
  const double start = Now();
  for (size_t i = 0; i < 2 * blocks.count(); ++i)
    Must(line->AllReduce(memory->data(), blocks.boundary(), type, {}, {}).Wait());
  return Now() - start;
}

// The same, both ranks at once and one every `gap` seconds, which they are busy else: the threads
// that they then wait for have slept meanwhile.
double SumsApart(Communicator* line, const Blocks& blocks, DType type, double begin, double gap,
                 std::vector<char>* memory) {
  double seconds = 0;
  for (size_t i = 0; i < 2 * blocks.count(); ++i) {
    begin += gap;
    while (Now() < begin) {
    }
    const double start = Now();
    Must(line->AllReduce(memory->data(), blocks.boundary(), type, {}, {}).Wait());
    seconds += Now() - start;
  }
  return seconds;
}

}  // namespace

TensorForward MeasureTensorForward(const ModelTable& model, int64_t micro_batch, DType type,
                                   int rounds) {
  const MeshShape shape{.pipeline = 1, .data = 1, .tensor = 2};
  MemoryRendezvous rendezvous;
  TensorForward measured;
  std::vector<double> whole, whole_products, split, split_products, sums, apart;
  double begin = 0, gap = 0;  // rank 0's, of both
  int64_t sent = 0;
  OnTwoRanks([&](int rank) {
    RankLines lines = Connect(shape, rank, &rendezvous);
    TensorGroup group(lines.tensor.get(), nullptr, lines.device->compute());
    // Both cores are busy with it, as in a job of two data-parallel ranks.
    Blocks alone(MakeTensorRank(model, 1, 0), nullptr, micro_batch, type);
    Blocks half(MakeTensorRank(model, 2, rank), &group, micro_batch, type);
    std::vector<char> memory(static_cast<size_t>(half.boundary()) * SizeOf(type));
    for (int round = -1; round < rounds; ++round) {
      Must(lines.job->Barrier({}).Wait());
      const auto [seconds, products] = alone.Forward();
      Must(lines.job->Barrier({}).Wait());
      const auto [split_seconds, split_in_products] = half.Forward();
      Must(group.Drain());
      Must(lines.job->Barrier({}).Wait());
      const double of_sums = Sums(lines.tensor.get(), half, type, &memory);
      if (rank == 0) {
        begin = Now() + 0.01;
        gap = split_seconds / static_cast<double>(2 * half.count());
      }
      Must(lines.job->Barrier({}).Wait());
      const double of_apart = SumsApart(lines.tensor.get(), half, type, begin, gap, &memory);
      if (rank != 0 || round < 0) continue;
      whole.push_back(seconds);
      whole_products.push_back(products);
      split.push_back(split_seconds);
      split_products.push_back(split_in_products);
      sums.push_back(of_sums);
      apart.push_back(of_apart);
    }
    if (rank == 0)
      sent = static_cast<int64_t>(2 * half.count()) * AllReduceBytes(half.boundary(), type, 2, 0);
    Must(lines.job->Barrier({}).Wait());
  });
  measured.whole = Median(whole);
  measured.whole_products = Median(whole_products);
  measured.split = Median(split);
  measured.split_products = Median(split_products);
  measured.sums = Median(sums);
  measured.sums_apart = Median(apart);
  measured.sum_bytes_a_second = static_cast<double>(sent) / measured.sums;
  return measured;
}

}  // namespace zeroshard::bench
