#include "common/plan/tensor_traffic.h"

#include "absl/strings/str_cat.h"
#include "common/plan/tensor_slices.h"

namespace zeroshard {
namespace {

using namespace traffic;

class Sums {
 public:
  Sums(int size, int rank, DType type, TrafficTable* table)
      : size_(size), rank_(rank), type_(type), table_(*table) {}
  void Add(size_t phase, int64_t times, int64_t elements) {
    table_[kAllReduce][phase] +=
        static_cast<uint64_t>(times * AllReduceBytes(elements, type_, size_, rank_));
  }

 private:
  const int size_, rank_;
  const DType type_;
  TrafficTable& table_;
};

// The norms of a unit: a weight, with a bias behind it or not.
void AddNorms(const UnitTable& unit, Sums* sums) {
  for (const char* name : {"ln_1", "ln_2", "ln_f", "norm_1", "norm_2", "norm_f"}) {
    const ParameterInfo* weight = unit.Find(absl::StrCat(name, ".weight"));
    if (weight == nullptr) continue;
    const ParameterInfo* bias = unit.Find(absl::StrCat(name, ".bias"));
    const ParameterInfo& last = bias == nullptr ? *weight : *bias;
    if (weight->trainable || last.trainable)
      sums->Add(kBackward, 1, last.offset + last.size - weight->offset);
  }
}

// Gathers and reduce-scatters of n elements in `size` equal parts.
struct Parts {
  uint64_t bytes = 0;  // of one of either
  TrafficTable* table = nullptr;
  void Add(size_t phase, uint64_t gathers, uint64_t scatters) const {
    (*table)[kAllGather][phase] += gathers * bytes;
    (*table)[kReduceScatter][phase] += scatters * bytes;
  }
};

// Keys and values lie side by side; so do their biases, but for the layout's padding.
void AddCopies(const UnitTable& block, const char* key, const char* value, Sums* copies) {
  const ParameterInfo* k = block.Find(key);
  const ParameterInfo* v = block.Find(value);
  if (k == nullptr || v == nullptr || (!k->trainable && !v->trainable)) return;
  copies->Add(kBackward, 1, v->offset + v->size - k->offset);
}

}  // namespace

TensorShare TensorShareOf(const ModelConfig& full, int tensor, int rank) {
  return {.rank = rank, .copies = KeyValueCopies(full, tensor)};
}

TrafficTable TensorTraffic(const ModelConfig& slice, const UnitTable& unit,
                           const TensorShare& share, int64_t micro_batch, DType type,
                           bool checkpointing) {
  TrafficTable table{};
  if (slice.tensor == 1) return table;
  const int64_t sequence = slice.sequence * slice.hidden, all = micro_batch * sequence;
  const bool divided = slice.DividesRows();
  Sums sums(slice.tensor, share.rank, type, &table);
  const Parts parts{
      .bytes = static_cast<uint64_t>(all / slice.tensor * (slice.tensor - 1)) * SizeOf(type),
      .table = &table};
  if (divided) AddNorms(unit, &sums);
  switch (unit.kind) {
    case UnitKind::kEmbedding:
      if (divided) {
        parts.Add(kForward, 0, 1);
        parts.Add(kBackward, 1, 0);
      } else {
        sums.Add(kForward, 1, all);
      }
      break;
    case UnitKind::kBlock: {
      if (divided) {
        parts.Add(kForward, 2, 2);
        parts.Add(kBackward, checkpointing ? 5 : 4, checkpointing ? 3 : 2);
      } else {
        sums.Add(kForward, 2, all);
        sums.Add(kBackward, checkpointing ? 3 : 2, all);
      }
      Sums copies(share.copies, share.rank % share.copies, type, &table);
      AddCopies(unit, "attn.k.weight", "attn.v.weight", &copies);
      AddCopies(unit, "attn.k.bias", "attn.v.bias", &copies);
      break;
    }
    case UnitKind::kHead:
      table[kAllGather][kForward] +=
          static_cast<uint64_t>((slice.tensor - 1) * micro_batch * 3 * slice.sequence * 4);
      if (divided) {
        parts.Add(kForward, 1, 0);
        parts.Add(kBackward, 0, 1);
      } else {
        sums.Add(kBackward, micro_batch, sequence);
      }
      break;
  }
  return table;
}

}  // namespace zeroshard
