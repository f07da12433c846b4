#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/plan/model_table.h"
#include "common/spec/decision.h"
#include "common/status_macros.h"
#include "tests/gpu/bench.h"
#include "tests/gpu/bench_steps.h"
#include "worker/device/host_stream.h"

namespace zeroshard::gpu_bench {
namespace {

constexpr char kGpt2[] =
    "architecture: gpt2, hidden_size: 768, layers: 12, heads: 12, sequence_length: 1024, "
    "vocab_size: 50257";
constexpr int kMicroBatch = 16;
constexpr int kRounds = 2;

// Takes gradients and hands out parameters by copies alone, as a store of this host would with an
// optimizer that costs nothing.
class CopyingStore : public StateStore {
 public:
  CopyingStore(const v1::JobSpec& spec, int64_t longest_unit)
      : spec_(spec), memory_(static_cast<size_t>(longest_unit)), pushed_(memory_.size()) {
    uint32_t state = 1;
    for (uint16_t& value : memory_) {  // +-0.0156 to 0.0313: the products have work to do
      state = state * 1664525u + 1013904223u;
      value = static_cast<uint16_t>(((state >> 16) & 0x807f) | (121 << 7));
    }
  }
  v1::StateVersion base() const override { return {}; }
  Event Push(uint64_t, int, int64_t begin, int64_t end, const void* data,
             const Event& after) override {
    return Move(pushes_.get(), pushed_.data(), data, end - begin, after, &counters_.pushed);
  }
  Event Pull(uint64_t, int, int64_t begin, int64_t end, void* out, const Event& after) override {
    return Move(pulls_.get(), out, memory_.data(), end - begin, after, &counters_.pulled);
  }
  absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord& record, uint64_t,
                                          uint64_t) override {
    return MakeDecision(spec_, record.step(), record.grad_norm(), record.tokens());
  }
  void Abort(const std::string&) override {}
  const OffloadCounters& counters() const override { return counters_; }

 private:
  static Event Move(HostStream* stream, void* to, const void* from, int64_t elements, Event after,
                    std::atomic<uint64_t>* counter) {
    const auto bytes = static_cast<size_t>(elements) * 2;
    return stream->Enqueue([=]() -> absl::Status {
      ZS_RETURN_IF_ERROR(after.Wait());
      std::memcpy(to, from, bytes);
      *counter += bytes;
      return absl::OkStatus();
    });
  }

  const v1::JobSpec spec_;
  std::vector<uint16_t> memory_, pushed_;
  OffloadCounters counters_;
  std::unique_ptr<HostStream> pushes_ = MakeHostStream("pushes");
  std::unique_ptr<HostStream> pulls_ = MakeHostStream("pulls");
};

absl::StatusOr<double> StepSeconds(int stage, bool offload, int steps) {
  std::vector<std::string> more = {absl::StrFormat("zero_optimization.stage=%d", stage)};
  if (offload) more.push_back("zero_optimization.offload_optimizer.device=cpu");
  ZS_ASSIGN_OR_RETURN(const v1::JobSpec spec, MakeJob(kGpt2, kMicroBatch, steps, more));
  std::unique_ptr<StateStore> store;
  if (offload) {
    ZS_ASSIGN_OR_RETURN(const ModelTable model, MakeModelTable(spec.model()));
    int64_t longest = 0;
    for (const UnitTable& unit : model.units) longest = std::max(longest, unit.length);
    store = std::make_unique<CopyingStore>(spec, longest);
  }
  ZS_ASSIGN_OR_RETURN(const StepTimes times, RunJob(spec, std::move(store)));
  return times.seconds;
}

// With and without take turns; the shorter of each counts.
absl::Status Compare(int stage, int steps, const std::string& row, Table* table) {
  double best[2] = {1e30, 1e30};
  for (int round = 0; round < kRounds; ++round) {
    for (const bool offload : {false, true}) {
      ZS_ASSIGN_OR_RETURN(const double seconds, StepSeconds(stage, offload, steps));
      best[offload ? 1 : 0] = std::min(best[offload ? 1 : 0], seconds);
    }
  }
  table->Add(row, "step without", 1e3 * best[0], "ms");
  table->Add(row, "step with", 1e3 * best[1], "ms");
  table->Add(row, "with over without", best[1] / best[0], "");
  return absl::OkStatus();
}

}  // namespace

void MeasureOffload(const StepOptions& options, Table* table) {
  for (const int stage : {1, 3}) {
    const std::string row = absl::StrFormat("offload, gpt2 124M, stage %d", stage);
    const absl::Status status = Compare(stage, options.steps, row, table);
    if (!status.ok()) table->Missing(row, "with over without", status.ToString());
  }
}

}  // namespace zeroshard::gpu_bench
