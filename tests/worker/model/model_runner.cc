#include "tests/worker/model/model_runner.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/model/pass.h"

namespace zeroshard {
namespace {

constexpr int64_t kGuard = 64;  // bytes
constexpr unsigned char kMark = 0xA5;

// Memory of a test runs out or a device fails: there is nothing to go on with.
void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "model_runner: %s\n", status.ToString().c_str());
  std::abort();
}

// What a model is run on.
class Machine {
 public:
  explicit Machine(const RunOptions& options)
      : host_(MakeCpuDevice()),
        host_ops_(MakeCpuOps(options.threads)),
        device(options.device != nullptr ? options.device : host_.get()),
        ops(options.ops != nullptr ? options.ops : host_ops_.get()) {}

 private:
  const std::unique_ptr<Device> host_;
  const std::unique_ptr<Ops> host_ops_;

 public:
  Device* const device;
  Ops* const ops;
};

Buffer Upload(Device* device, const std::vector<char>& bytes) {
  absl::StatusOr<Buffer> buffer = device->Allocate(bytes.size(), MemoryKind::kBuffers);
  Must(buffer.status());
  if (!bytes.empty()) Must(CopyAndWait(device, buffer->data(), bytes.data(), bytes.size()));
  return *std::move(buffer);
}

// An empty vector has no memory.
template <typename T>
Buffer Upload(Device* device, const std::vector<T>& values) {
  const char* data = reinterpret_cast<const char*>(values.data());
  return Upload(device, std::vector<char>(data, data + values.size() * sizeof(T)));
}

template <typename T>
std::vector<T> Download(Device* device, const void* data, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  Must(CopyAndWait(device, values.data(), data, values.size() * sizeof(T)));
  return values;
}

// A block of the device's memory, filled with NaNs, with a guard behind it.
class Block {
 public:
  Block(const std::string& name, int64_t bytes, Device* device)
      : name_(name), bytes_(bytes), device_(device) {
    std::vector<char> values(static_cast<size_t>(bytes + kGuard), '\xFF');
    std::fill(values.begin() + bytes, values.end(), static_cast<char>(kMark));
    memory_ = Upload(device, values);
  }
  void* data() const { return memory_.data(); }
  absl::Status Check() const {
    for (const char seen : Download<char>(device_, memory_.as<char>() + bytes_, kGuard)) {
      if (static_cast<unsigned char>(seen) != kMark)
        return absl::InternalError(absl::StrCat("written beyond the end of ", name_));
    }
    return absl::OkStatus();
  }

 private:
  std::string name_;
  int64_t bytes_;
  Device* device_;
  Buffer memory_;
};

// Of the device's memory.
std::vector<float> ToFloats(Device* device, const void* data, DType dtype, int64_t n) {
  if (dtype == DType::kF32) return Download<float>(device, data, n);
  const std::vector<uint16_t> halves = Download<uint16_t>(device, data, n);
  std::vector<float> out(static_cast<size_t>(n));
  MakeCpuOps(1)->Convert(halves.data(), dtype, n, out.data(), DType::kF32);
  return out;
}

// A unit's flat vector, rounded to dtype.
Block Parameters(const UnitTable& unit, const std::vector<float>& flat, DType dtype,
                 Device* device) {
  const int64_t bytes = unit.length * static_cast<int64_t>(SizeOf(dtype));
  Block block(unit.name + " parameters", bytes, device);
  std::vector<char> rounded(static_cast<size_t>(bytes));
  MakeCpuOps(1)->Convert(flat.data(), DType::kF32, unit.length, rounded.data(), dtype);
  Must(CopyAndWait(device, block.data(), rounded.data(), rounded.size()));
  return block;
}

const void* HeadMatrix(const ModelTable& table, const std::vector<Block>& params, DType dtype) {
  if (table.config.tied) return params[0].data();
  return Advance(params.back().data(), table.units.back().Find("lm_head.weight")->offset, dtype);
}

Model ModelOf(const ModelTable& table, const RunOptions& options) {
  return options.slice == nullptr ? MakeModel(table, options.checkpointing)
                                  : MakeModel(*options.slice, options.checkpointing, options.group);
}

// The device's work, and the group's.
absl::Status Finish(Device* device, const RunOptions& options) {
  ZS_RETURN_IF_ERROR(device->compute()->Record().Wait());
  return options.group == nullptr ? absl::OkStatus() : options.group->Drain();
}

}  // namespace

RecordingSink::RecordingSink(int64_t length, DType dtype, Device* device)
    : length_(length),
      dtype_(dtype),
      host_(device == nullptr ? MakeCpuDevice() : nullptr),
      device_(device == nullptr ? host_.get() : device),
      memory_(
          Upload(device_, std::vector<char>(static_cast<size_t>(length) * SizeOf(dtype), '\xFF'))),
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
  std::vector<float> values = ToFloats(device_, memory_.data(), dtype_, length_);
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
  const Machine machine(options);
  Device* const device = machine.device;
  const Buffer token_memory = Upload(device, tokens), target_memory = Upload(device, targets);
  const Buffer document_memory = Upload(device, options.document_start);
  MicroBatch mb;
  mb.batch = static_cast<int64_t>(tokens.size()) / c.sequence;
  mb.tokens = token_memory.as<int32_t>();
  mb.targets = target_memory.as<int32_t>();
  if (!options.document_start.empty()) mb.document_start = document_memory.as<int32_t>();
  mb.dropout = options.dropout;
  mb.seed = options.seed;
  mb.step = options.step;
  mb.first_sample = options.first_sample;
  const int64_t boundary = StreamRows(c, mb.batch) * c.hidden;
  const int64_t row_elements = mb.batch * c.sequence * c.hidden;

  std::vector<Block> params, kept;
  std::vector<RecordingSink> sinks;
  int64_t scratch_bytes = 0;
  for (size_t u = 0; u < table.units.size(); ++u) {
    const UnitTable& unit = table.units[u];
    params.push_back(Parameters(unit, flat[u], dtype, device));
    const ActivationTable activations =
        MakeActivationTable(c, unit.kind, mb.batch, dtype, options.checkpointing);
    kept.emplace_back(unit.name + " kept", activations.kept_bytes, device);
    scratch_bytes = std::max(scratch_bytes, activations.scratch_bytes);
    sinks.emplace_back(unit.length, dtype, device);
  }
  const Block scratch("scratch", scratch_bytes, device);
  const Block d_first("gradient", boundary * elem, device);
  const Block d_second("second gradient", boundary * elem, device);
  const Block rows("embedding rows", row_elements * elem, device);
  const auto context = [&](size_t unit) {
    return UnitContext{machine.ops, dtype, kept[unit].data(), scratch.data()};
  };

  Model model = ModelOf(table, options);
  const size_t last = table.units.size() - 1;
  const void* lm_head = HeadMatrix(table, params, dtype);
  RecordingSink* head_sink = c.tied ? &sinks[0] : &sinks[last];
  const int64_t head_offset = c.tied ? 0 : table.units[last].Find("lm_head.weight")->offset;

  std::vector<Block> apart;
  std::vector<void*> inputs(table.units.size());
  for (size_t u = 1; u < table.units.size(); ++u) {
    if (options.separate_buffers) apart.emplace_back("input", boundary * elem, device);
    inputs[u] = options.separate_buffers ? apart.back().data() : kept[u].data();
  }

  const Buffer losses = Upload(device, std::vector<double>(2));
  ZS_RETURN_IF_ERROR(model.embedding->Forward(context(0), params[0].data(), mb, inputs[1]));
  for (size_t u = 1; u < last; ++u) {
    ZS_RETURN_IF_ERROR(
        model.blocks[u - 1]->Forward(context(u), params[u].data(), mb, inputs[u], inputs[u + 1]));
  }
  const void* x = inputs[last];
  ZS_RETURN_IF_ERROR(model.head->Loss(context(last), params[last].data(), lm_head, mb, x,
                                      losses.as<double>() + 1));
  void* dx = d_first.data();
  ZS_RETURN_IF_ERROR(model.head->LossAndBackward(context(last), params[last].data(), lm_head, mb, x,
                                                 dx, &sinks[last], head_sink, head_offset,
                                                 losses.as<double>()));
  for (size_t u = last - 1; u >= 1; --u) {
    void* below = dx;
    if (options.separate_buffers) below = dx == d_first.data() ? d_second.data() : d_first.data();
    ZS_RETURN_IF_ERROR(model.blocks[u - 1]->Backward(context(u), params[u].data(), mb, inputs[u],
                                                     dx, below, &sinks[u]));
    dx = below;
  }
  const Buffer id_memory = Upload(device, std::vector<int32_t>(tokens.size()));
  ZS_RETURN_IF_ERROR(model.embedding->Backward(context(0), mb, dx, id_memory.as<int32_t>(),
                                               rows.data(), &sinks[0]));
  ZS_RETURN_IF_ERROR(Finish(device, options));
  for (const std::vector<Block>* blocks : {&kept, &apart})
    for (const Block& block : *blocks) ZS_RETURN_IF_ERROR(block.Check());
  for (const Block* block : {&scratch, &d_first, &d_second, &rows})
    ZS_RETURN_IF_ERROR(block->Check());

  RunResult result;
  const std::vector<double> sums = Download<double>(device, losses.data(), 2);
  result.loss = sums[0];
  result.loss_only = sums[1];
  for (size_t u = 0; u < table.units.size(); ++u) {
    const std::vector<float> values = sinks[u].Values();
    for (const ParameterInfo& p : table.units[u].parameters) {
      result.gradients[p.name].assign(values.begin() + p.offset,
                                      values.begin() + p.offset + p.size);
    }
    result.done.push_back(sinks[u].done());
    result.inputs.push_back(u == 0 ? std::vector<float>()
                                   : ToFloats(device, inputs[u], dtype, boundary));
  }
  std::vector<float>& token_table = result.gradients[table.units[0].parameters[0].name];
  if (!c.tied) std::fill(token_table.begin(), token_table.end(), 0.0f);
  const std::vector<float> touched = ToFloats(device, rows.data(), dtype, row_elements);
  const auto ids = Download<int32_t>(device, id_memory.data(), static_cast<int64_t>(tokens.size()));
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
  const Machine machine(options);
  Device* const device = machine.device;
  const Buffer token_memory = Upload(device, tokens);
  Model model = ModelOf(table, options);
  const int64_t vocab = options.slice == nullptr ? c.vocab : options.slice->full_vocab;

  std::vector<Block> params, keys, values;
  for (size_t u = 0; u < table.units.size(); ++u) {
    params.push_back(Parameters(table.units[u], flat[u], dtype, device));
    keys.emplace_back("keys", capacity * c.kv_heads * c.head_dim * elem, device);
    values.emplace_back("values", capacity * c.kv_heads * c.head_dim * elem, device);
  }
  const size_t last = table.units.size() - 1;
  const void* lm_head = HeadMatrix(table, params, dtype);

  const Buffer logits =
      Upload(device, std::vector<float>(tokens.size() * static_cast<size_t>(vocab)));
  int64_t past = 0;
  for (const int64_t rows : pieces) {
    // Exactly as much as is asked for, so that the guards find what is written beyond.
    const Block scratch("scratch", DecodeScratchBytes(c, rows, dtype), device);
    const Block x("x", rows * c.hidden * elem, device), y("y", rows * c.hidden * elem, device);
    const UnitContext context{machine.ops, dtype, nullptr, scratch.data()};
    void* in = x.data();
    void* out = y.data();
    ZS_RETURN_IF_ERROR(model.embedding->Decode(context, params[0].data(), past, rows,
                                               token_memory.as<int32_t>() + past, in));
    for (size_t u = 1; u < last; ++u) {
      const KvCache cache{keys[u].data(), values[u].data(), capacity};
      ZS_RETURN_IF_ERROR(
          model.blocks[u - 1]->Decode(context, params[u].data(), past, rows, cache, in, out));
      std::swap(in, out);
    }
    ZS_RETURN_IF_ERROR(model.head->Logits(context, params[last].data(), lm_head, rows, in,
                                          logits.as<float>() + past * vocab));
    ZS_RETURN_IF_ERROR(Finish(device, options));
    for (const Block* block : {&scratch, &x, &y}) ZS_RETURN_IF_ERROR(block->Check());
    past += rows;
  }
  for (const Block& block : keys) ZS_RETURN_IF_ERROR(block.Check());
  for (const Block& block : values) ZS_RETURN_IF_ERROR(block.Check());
  return Download<float>(device, logits.data(), static_cast<int64_t>(tokens.size()) * vocab);
}

}  // namespace zeroshard
