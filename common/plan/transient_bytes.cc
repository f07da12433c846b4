#include "common/plan/transient_bytes.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <vector>

#include "common/plan/planner.h"

namespace zeroshard {
namespace {

// As worker/zero/reduce has it.
constexpr size_t kGradientBuffers = 3;
// What one step leaves in a pool the next one finds there; the third finds nothing new.
constexpr int kSteps = 3;
// Of the head matrix's gradient, as worker/model/head has it.
constexpr int64_t kHeadElements = int64_t{1} << 22;

// worker/zero/buffer_pool.h, in elements: what it has taken of the device, ever.
class Pool {
 public:
  // `most`: 0 is boundless.
  explicit Pool(int64_t most) : most_(most) {}
  // The size of the buffer that is lent.
  int64_t Take(int64_t size) {
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (*it < size || *it > (most_ > 0 ? size : 2 * size)) continue;
      if (best == free_.end() || *it < *best) best = it;
    }
    if (best != free_.end()) {
      size = *best;
      free_.erase(best);
    } else {
      while (most_ > 0 && !free_.empty() && held_ + size > most_) {
        held_ -= free_.front();
        free_.pop_front();
      }
      held_ += size;
      peak_ = std::max(peak_, held_);
    }
    return size;
  }
  void Give(int64_t size) {
    if (size > 0) free_.push_back(size);
  }
  int64_t peak() const { return peak_; }

 private:
  const int64_t most_;
  std::deque<int64_t> free_;
  int64_t held_ = 0, peak_ = 0;
};

// worker/zero/gather.cc, use by use.
class Gathers {
 public:
  explicit Gathers(const ZeroPolicy& policy)
      : policy_(policy),
        uses_(policy.uses),
        pool_(policy.options.offload_param ? policy.options.max_live : 0),
        held_(uses_.size(), 0) {}

  int64_t Peak() {
    for (int step = 0; step < kSteps; ++step) Step();
    return pool_.peak();
  }

 private:
  void Step() {
    const int head = static_cast<int>(policy_.layouts.size()) - 1;
    std::fill(held_.begin(), held_.end(), 0);
    std::vector<size_t> open;
    for (size_t i = 0; i < uses_.size(); ++i) {
      if (uses_[i].gather && held_[i] == 0) Issue(i);
      Prefetch(i);
      open.push_back(i);
      // A tied table is there until the head, whose use follows, is done with it.
      if (policy_.tied && uses_[i].unit == 0 && i + 1 < uses_.size() && uses_[i + 1].unit == head)
        continue;
      for (const size_t use : open) End(use);
      open.clear();
    }
  }

  const ShardLayout& Layout(size_t use) const {
    return policy_.layouts[static_cast<size_t>(uses_[use].unit)];
  }
  void Issue(size_t use) {
    held_[use] = pool_.Take(Layout(use).Padded());
    live_ += Layout(use).length;
  }
  void Prefetch(size_t use) {
    int64_t ahead = 0;
    const size_t end = std::min(uses_.size(), use + 2 * policy_.layouts.size() + 2);
    for (size_t next = use + 1; next < end; ++next) {
      if (!uses_[next].gather) continue;
      ahead += Layout(next).length;
      if (ahead > policy_.options.prefetch_bucket) return;
      if (held_[next] != 0) continue;
      if (live_ + Layout(next).length > policy_.options.max_live) return;
      Issue(next);
    }
  }
  void End(size_t use) {
    if (policy_.resident[static_cast<size_t>(uses_[use].unit)]) return;
    if (uses_[use].release) {
      pool_.Give(held_[use]);
      live_ -= Layout(use).length;
      return;
    }
    size_t next = use + 1;
    while (next < uses_.size() && uses_[next].unit != uses_[use].unit) ++next;
    if (next < uses_.size()) held_[next] = held_[use];
  }

  const ZeroPolicy& policy_;
  const std::vector<UnitUse>& uses_;
  Pool pool_;
  std::vector<int64_t> held_;  // by use: its buffer's size
  int64_t live_ = 0;
};

// worker/zero/reduce.cc: what backward writes to where it is not the unit's whole gradient.
class Gradients {
 public:
  Gradients(const ModelTable& model, const ZeroPolicy& policy) : model_(model), policy_(policy) {}

  int64_t Peak() {
    for (int step = 0; step < kSteps; ++step) {
      const int64_t passes = policy_.uses_span_step ? 1 : std::min<int64_t>(policy_.rounds, 3);
      for (int64_t pass = 0; pass < passes; ++pass) Pass();
      EndOfStep();
    }
    return pool_.peak();
  }

 private:
  // The backwards of the policy's uses, in their order.
  void Pass() {
    const int head = static_cast<int>(model_.units.size()) - 1;
    bool with_block = false;
    for (const UnitUse& use : policy_.uses) {
      if (!use.backward && use.unit != head) continue;
      Backward(use.unit);
      if (use.unit != 1) continue;
      Backward(0);
      with_block = true;
    }
    if (!with_block) Backward(0);
  }

  // Sums of a rank's own micro-batches are reduced in the wire type; at stage 0 those that are kept
  // in fp32 go through it to all, too.
  void EndOfStep() {
    if (policy_.gradient_mode != GradientMode::kFullAccumulate) return;
    for (size_t u = 0; u < model_.units.size(); ++u)
      if (policy_.trained[u]) Take(policy_.layouts[u].length);
    const bool through = policy_.options.stage == 0 && policy_.options.dtype != DType::kF32;
    for (size_t u = 0; u < model_.units.size() && through; ++u)
      if (policy_.trained[u]) Take(policy_.layouts[u].Padded());
  }

  void Take(int64_t size) {
    if (size == 0) return;
    while (in_flight_.size() >= kGradientBuffers) {
      pool_.Give(in_flight_.front());
      in_flight_.pop_front();
    }
    in_flight_.push_back(pool_.Take(size));
  }

  bool Direct(size_t unit) const {
    return policy_.trained[unit] && policy_.gradient_mode == GradientMode::kFullWire;
  }

  void Backward(int unit) {
    const auto u = static_cast<size_t>(unit);
    const UnitTable& table = model_.units[u];
    switch (table.kind) {
      case UnitKind::kBlock:
        if (!Direct(u)) Take(table.length);
        break;
      case UnitKind::kHead:
        if (!table.parameters.empty()) Head(table);
        break;
      case UnitKind::kEmbedding:
        if (policy_.has_rows) Embedding(table);
        break;
    }
  }

  void Head(const UnitTable& head) {
    const size_t last = model_.units.size() - 1, matrix_unit = policy_.tied ? 0 : last;
    const ModelConfig& c = model_.config;
    const int64_t rows =
        std::min(std::max<int64_t>(64, kHeadElements / c.hidden / 64 * 64), c.vocab);
    for (int64_t row = 0; row < c.vocab && !Direct(matrix_unit); row += rows)
      Take(RoundUp(std::min(rows, c.vocab - row) * c.hidden, 64));
    const ParameterInfo* matrix = head.Find("lm_head.weight");
    if (!Direct(last)) Take(matrix == nullptr ? head.length : matrix->offset);
  }

  void Embedding(const UnitTable& table) {
    const ElementRange blocks = TokenTableBlocks(model_);
    if (!Direct(0)) Take(table.length - blocks.end);
    if (!policy_.table_trained || policy_.gradient_mode == GradientMode::kFullAccumulate ||
        policy_.sparse_rows)
      return;
    if (policy_.tied || !Direct(0)) Take(blocks.size());
  }

  const ModelTable& model_;
  const ZeroPolicy& policy_;
  Pool pool_{0};
  std::deque<int64_t> in_flight_;
};

// The token table's gradient as rows (worker/zero/token_rows.cc), and what the ends of a table that
// is tied and apart exchange (worker/zero/tied_table.cc).
double TableBytes(const ModelTable& model, const ZeroPolicy& policy) {
  const double wire = static_cast<double>(SizeOf(policy.options.dtype));
  const double hidden = static_cast<double>(model.config.hidden);
  const double row = 4 + hidden * wire;
  double bytes = 0;
  if (policy.has_rows) {
    bytes += static_cast<double>(policy.options.micro_batch * model.config.sequence) * row;
    if (policy.table_trained && policy.sparse_rows) {
      const ElementRange table = TokenTable(model);
      const int64_t touched =
          RowsTouched(table, Owned(policy.layouts.front(), 0, table), model.config.hidden);
      bytes += static_cast<double>(policy.row_slots * policy.options.world) * row;
      bytes += 4 * static_cast<double>(touched + RowCapacity(model, policy, 0) + 1);
    }
  }
  const bool apart = policy.copies_table || (policy.has_rows && model.config.tied && !policy.tied);
  if (apart && policy.table_trained) {
    const ElementRange owned = Owned(policy.layouts.front(), 0, TokenTableBlocks(model));
    const bool converted = policy.options.dtype != DType::kF32 && policy.rounds > 1;
    bytes += static_cast<double>(owned.size()) * wire * (converted ? 2 : 1);
  }
  return bytes;
}

}  // namespace

uint64_t TransientBytes(const ModelTable& model, const ZeroPolicy& policy) {
  const double elements = static_cast<double>(Gathers(policy).Peak()) +
                          static_cast<double>(Gradients(model, policy).Peak());
  const double bytes =
      elements * static_cast<double>(SizeOf(policy.options.dtype)) + TableBytes(model, policy);
  return bytes < 1e19 ? static_cast<uint64_t>(bytes) : std::numeric_limits<uint64_t>::max();
}

}  // namespace zeroshard
