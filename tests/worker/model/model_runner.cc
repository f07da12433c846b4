#include "tests/worker/model/model_runner.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/model/pass.h"

namespace zeroshard {
namespace {

constexpr int64_t kGuard = 64;  // bytes
constexpr unsigned char kMark = 0xA5;

// A block of memory at a multiple of 64, filled with NaNs, with a guard behind it.
class Block {
 public:
  Block(const std::string& name, int64_t bytes)
      : name_(name),
        bytes_(bytes),
        data_(static_cast<char*>(std::aligned_alloc(64, bytes + kGuard))) {
    std::memset(data_.get(), 0xFF, static_cast<size_t>(bytes));
    std::memset(data_.get() + bytes, kMark, kGuard);
  }
  void* data() const { return data_.get(); }
  absl::Status Check() const {
    for (int64_t i = 0; i < kGuard; ++i) {
      if (static_cast<unsigned char>(data_.get()[bytes_ + i]) != kMark) {
        return absl::InternalError(absl::StrCat("written beyond the end of ", name_));
      }
    }
    return absl::OkStatus();
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::string name_;
  int64_t bytes_;
  std::unique_ptr<char, Free> data_;
};

std::vector<float> ToFloats(Ops* ops, const void* data, DType dtype, int64_t n) {
  std::vector<float> out(static_cast<size_t>(n));
  if (dtype == DType::kF32) {
    std::memcpy(out.data(), data, static_cast<size_t>(n) * sizeof(float));
  } else {
    ops->Convert(data, dtype, n, out.data(), DType::kF32);
  }
  return out;
}

// A unit's flat vector, rounded to dtype.
Block Parameters(const UnitTable& unit, const std::vector<float>& flat, DType dtype, Ops* ops) {
  const int64_t bytes = unit.length * static_cast<int64_t>(SizeOf(dtype));
  Block block(unit.name + " parameters", bytes);
  if (dtype == DType::kF32) {
    std::memcpy(block.data(), flat.data(), static_cast<size_t>(bytes));
  } else {
    ops->Convert(flat.data(), DType::kF32, unit.length, block.data(), dtype);
  }
  return block;
}

const void* HeadMatrix(const ModelTable& table, const std::vector<Block>& params, DType dtype) {
  if (table.config.tied) return params[0].data();
  return Advance(params.back().data(), table.units.back().Find("lm_head.weight")->offset, dtype);
}

}  // namespace

RecordingSink::RecordingSink(int64_t length, DType dtype)
    : length_(length),
      dtype_(dtype),
      memory_(static_cast<size_t>(length) * SizeOf(dtype), '\xFF'),
      open_(static_cast<size_t>(length / 64)),
      final_(static_cast<size_t>(length / 64)) {}

int64_t RecordingSink::open_ranges() const {
  int64_t count = 0;
  for (const Range& range : acquired_) {
    bool any = false;
    for (int64_t i = range.begin / 64; i < range.end / 64; ++i) any = any || open_[i];
    count += any;
  }
  return count;
}

absl::StatusOr<void*> RecordingSink::Acquire(int64_t begin, int64_t end) {
  if (begin % 64 != 0 || end % 64 != 0 || begin < 0 || end <= begin || end > length_) {
    return absl::InternalError(absl::StrCat("acquired [", begin, ", ", end, ") of ", length_));
  }
  for (int64_t i = begin / 64; i < end / 64; ++i) {
    if (open_[i] || final_[i]) return absl::InternalError(absl::StrCat("acquired again: ", 64 * i));
    open_[i] = true;
  }
  acquired_.push_back({begin, end});
  if (open_ranges() > 2) return absl::InternalError("more than two ranges are open");
  return Advance(memory_.data(), begin, dtype_);
}

absl::Status RecordingSink::Done(int64_t begin, int64_t end) {
  if (begin % 64 != 0 || end % 64 != 0 || end <= begin) {
    return absl::InternalError(absl::StrCat("done [", begin, ", ", end, ")"));
  }
  for (int64_t i = begin / 64; i < end / 64; ++i) {
    if (!open_[i]) return absl::InternalError(absl::StrCat("done but not acquired: ", 64 * i));
    open_[i] = false;
    final_[i] = true;
  }
  done_.push_back({begin, end});
  return absl::OkStatus();
}

std::vector<float> RecordingSink::Values() const {
  const std::unique_ptr<Ops> ops = MakeCpuOps(1);
  std::vector<float> values = ToFloats(ops.get(), memory_.data(), dtype_, length_);
  for (int64_t i = 0; i < length_; ++i) {
    if (!final_[i / 64]) values[i] = std::numeric_limits<float>::quiet_NaN();
  }
  return values;
}

absl::StatusOr<RunResult> RunModel(const ModelTable& table,
                                   const std::vector<std::vector<float>>& flat,
                                   const std::vector<int32_t>& tokens,
                                   const std::vector<int32_t>& targets, const RunOptions& options) {
  const ModelConfig& c = table.config;
  const DType dtype = options.dtype;
  const auto elem = static_cast<int64_t>(SizeOf(dtype));
  MicroBatch mb;
  mb.batch = static_cast<int64_t>(tokens.size()) / c.sequence;
  mb.tokens = tokens.data();
  mb.targets = targets.data();
  if (!options.document_start.empty()) mb.document_start = options.document_start.data();
  mb.dropout = options.dropout;
  mb.seed = options.seed;
  mb.step = options.step;
  mb.first_sample = options.first_sample;
  const int64_t boundary = mb.batch * c.sequence * c.hidden;
  const std::unique_ptr<Ops> ops = MakeCpuOps(options.threads);

  std::vector<Block> params, kept;
  std::vector<RecordingSink> sinks;
  int64_t scratch_bytes = 0;
  for (size_t u = 0; u < table.units.size(); ++u) {
    const UnitTable& unit = table.units[u];
    params.push_back(Parameters(unit, flat[u], dtype, ops.get()));
    const ActivationTable activations =
        MakeActivationTable(c, unit.kind, mb.batch, dtype, options.checkpointing);
    kept.emplace_back(unit.name + " kept", activations.kept_bytes);
    scratch_bytes = std::max(scratch_bytes, activations.scratch_bytes);
    sinks.emplace_back(unit.length, dtype);
  }
  const Block scratch("scratch", scratch_bytes);
  const Block d_first("gradient", boundary * elem);
  const Block d_second("second gradient", boundary * elem);
  const Block rows("embedding rows", boundary * elem);
  const auto context = [&](size_t unit) {
    return UnitContext{ops.get(), dtype, kept[unit].data(), scratch.data()};
  };

  Model model = MakeModel(table, options.checkpointing);
  const size_t last = table.units.size() - 1;
  const void* lm_head = HeadMatrix(table, params, dtype);
  RecordingSink* head_sink = c.tied ? &sinks[0] : &sinks[last];
  const int64_t head_offset = c.tied ? 0 : table.units[last].Find("lm_head.weight")->offset;

  std::vector<Block> apart;
  std::vector<void*> inputs(table.units.size());
  for (size_t u = 1; u < table.units.size(); ++u) {
    if (options.separate_buffers) apart.emplace_back("input", boundary * elem);
    inputs[u] = options.separate_buffers ? apart.back().data() : kept[u].data();
  }

  RunResult result;
  ZS_RETURN_IF_ERROR(model.embedding->Forward(context(0), params[0].data(), mb, inputs[1]));
  for (size_t u = 1; u < last; ++u) {
    ZS_RETURN_IF_ERROR(
        model.blocks[u - 1]->Forward(context(u), params[u].data(), mb, inputs[u], inputs[u + 1]));
  }
  const void* x = inputs[last];
  ZS_RETURN_IF_ERROR(
      model.head->Loss(context(last), params[last].data(), lm_head, mb, x, &result.loss_only));
  void* dx = d_first.data();
  ZS_RETURN_IF_ERROR(model.head->LossAndBackward(context(last), params[last].data(), lm_head, mb, x,
                                                 dx, &sinks[last], head_sink, head_offset,
                                                 &result.loss));
  for (size_t u = last - 1; u >= 1; --u) {
    void* below = dx;
    if (options.separate_buffers) below = dx == d_first.data() ? d_second.data() : d_first.data();
    ZS_RETURN_IF_ERROR(model.blocks[u - 1]->Backward(context(u), params[u].data(), mb, inputs[u],
                                                     dx, below, &sinks[u]));
    dx = below;
  }
  std::vector<int32_t> ids(tokens.size());
  ZS_RETURN_IF_ERROR(
      model.embedding->Backward(context(0), mb, dx, ids.data(), rows.data(), &sinks[0]));
  for (const Block& block : kept) ZS_RETURN_IF_ERROR(block.Check());
  for (const Block* block : {&scratch, &d_first, &d_second, &rows})
    ZS_RETURN_IF_ERROR(block->Check());

  for (size_t u = 0; u < table.units.size(); ++u) {
    const std::vector<float> values = sinks[u].Values();
    for (const ParameterInfo& p : table.units[u].parameters) {
      result.gradients[p.name].assign(values.begin() + p.offset,
                                      values.begin() + p.offset + p.size);
    }
    result.done.push_back(sinks[u].done());
  }
  std::vector<float>& token_table = result.gradients[table.units[0].parameters[0].name];
  if (!c.tied) std::fill(token_table.begin(), token_table.end(), 0.0f);
  const std::vector<float> touched = ToFloats(ops.get(), rows.data(), dtype, boundary);
  for (size_t i = 0; i < ids.size() && ids[i] >= 0; ++i) {
    for (int64_t j = 0; j < c.hidden; ++j) {
      token_table[ids[i] * c.hidden + j] += touched[i * c.hidden + j];
    }
  }
  return result;
}

absl::StatusOr<std::vector<float>> DecodeModel(const ModelTable& table,
                                               const std::vector<std::vector<float>>& flat,
                                               const std::vector<int32_t>& tokens,
                                               const std::vector<int64_t>& pieces, int64_t capacity,
                                               const RunOptions& options) {
  const ModelConfig& c = table.config;
  const DType dtype = options.dtype;
  const auto elem = static_cast<int64_t>(SizeOf(dtype));
  const std::unique_ptr<Ops> ops = MakeCpuOps(options.threads);
  Model model = MakeModel(table, options.checkpointing);

  std::vector<Block> params, keys, values;
  for (size_t u = 0; u < table.units.size(); ++u) {
    params.push_back(Parameters(table.units[u], flat[u], dtype, ops.get()));
    keys.emplace_back("keys", capacity * c.kv_heads * c.head_dim * elem);
    values.emplace_back("values", capacity * c.kv_heads * c.head_dim * elem);
  }
  const size_t last = table.units.size() - 1;
  const void* lm_head = HeadMatrix(table, params, dtype);

  std::vector<float> logits(tokens.size() * static_cast<size_t>(c.vocab));
  int64_t past = 0;
  for (const int64_t rows : pieces) {
    // Exactly as much as is asked for, so that the guards find what is written beyond.
    const Block scratch("scratch", DecodeScratchBytes(c, rows, dtype));
    const Block x("x", rows * c.hidden * elem), y("y", rows * c.hidden * elem);
    const UnitContext context{ops.get(), dtype, nullptr, scratch.data()};
    void* in = x.data();
    void* out = y.data();
    ZS_RETURN_IF_ERROR(
        model.embedding->Decode(context, params[0].data(), past, rows, tokens.data() + past, in));
    for (size_t u = 1; u < last; ++u) {
      const KvCache cache{keys[u].data(), values[u].data(), capacity};
      ZS_RETURN_IF_ERROR(
          model.blocks[u - 1]->Decode(context, params[u].data(), past, rows, cache, in, out));
      std::swap(in, out);
    }
    ZS_RETURN_IF_ERROR(model.head->Logits(context, params[last].data(), lm_head, rows, in,
                                          logits.data() + past * c.vocab));
    for (const Block* block : {&scratch, &x, &y}) ZS_RETURN_IF_ERROR(block->Check());
    past += rows;
  }
  for (const Block& block : keys) ZS_RETURN_IF_ERROR(block.Check());
  for (const Block& block : values) ZS_RETURN_IF_ERROR(block.Check());
  return logits;
}

}  // namespace zeroshard
