#include "worker/generate/generator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

// Activations of longer runs would rival the cache.
constexpr int64_t kMostRows = 1024;
constexpr int64_t kAlign = 64;  // bytes

// Bytes of each allocation.
struct Sizes {
  Sizes(const ModelConfig& config, DType dtype, int64_t capacity)
      : rows(std::min(kMostRows, capacity)),
        each(RoundUp(
            capacity * config.kv_heads * config.head_dim * static_cast<int64_t>(SizeOf(dtype)),
            kAlign)),
        cache(2 * config.layers * each),
        scratch(DecodeScratchBytes(config, rows, dtype)),
        boundary(rows * config.hidden * static_cast<int64_t>(SizeOf(dtype))),
        tokens(rows * static_cast<int64_t>(sizeof(int32_t))),
        logits(config.vocab * static_cast<int64_t>(sizeof(float))) {}

  int64_t rows;
  int64_t each;  // keys or values of one block
  int64_t cache, scratch, boundary, tokens, logits;
};

// Runs `work` on the unit's parameters and gives them back in any case.
template <typename Work>
absl::Status WithUnit(ParameterLender* lender, int unit, const Work& work) {
  ZS_ASSIGN_OR_RETURN(const LentParameters parameters, lender->Borrow(unit));
  absl::Status worked = work(parameters);
  absl::Status returned = lender->GiveBack(unit);
  return worked.ok() ? returned : worked;
}

}  // namespace

Generator::Generator(const Model* model, Device* device, Ops* ops, DType dtype, int64_t capacity)
    : model_(model),
      device_(device),
      config_(model->table.config),
      dtype_(dtype),
      capacity_(capacity),
      most_rows_(std::min(kMostRows, capacity)) {
  context_.ops = ops;
  context_.dtype = dtype;
}

int64_t Generator::Bytes(const ModelConfig& config, DType dtype, int64_t capacity) {
  const Sizes sizes(config, dtype, capacity);
  return sizes.cache + sizes.scratch + 2 * sizes.boundary + sizes.tokens + sizes.logits;
}

int64_t Generator::Positions(const ModelConfig& config) {
  return std::max(config.positions, config.sequence);
}

absl::StatusOr<std::unique_ptr<Generator>> Generator::Create(const Model* model, Device* device,
                                                             Ops* ops, DType dtype,
                                                             int64_t capacity) {
  const ModelConfig& config = model->table.config;
  if (capacity < 1 || capacity > Positions(config)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a sequence of ", capacity, " positions: the model has 1 to ", Positions(config)));
  }
  std::unique_ptr<Generator> made(new Generator(model, device, ops, dtype, capacity));
  const Sizes sizes(config, dtype, capacity);
  for (const auto& [buffer, bytes] : {std::pair{&made->cache_, sizes.cache},
                                      {&made->scratch_, sizes.scratch},
                                      {&made->input_, sizes.boundary},
                                      {&made->output_, sizes.boundary},
                                      {&made->tokens_, sizes.tokens},
                                      {&made->logits_, sizes.logits}}) {
    ZS_ASSIGN_OR_RETURN(*buffer,
                        device->Allocate(static_cast<size_t>(bytes), MemoryKind::kActivations));
  }
  ZS_ASSIGN_OR_RETURN(made->read_logits_, device->AllocateHost(static_cast<size_t>(sizes.logits)));
  made->context_.scratch = made->scratch_.data();
  char* next = made->cache_.as<char>();
  for (int64_t block = 0; block < config.layers; ++block, next += 2 * sizes.each) {
    made->caches_.push_back({.keys = next, .values = next + sizes.each, .capacity = capacity});
  }
  return made;
}

absl::Status Generator::Pass(absl::Span<const int32_t> tokens, bool last, ParameterLender* lender) {
  const auto rows = static_cast<int64_t>(tokens.size());
  void* x = input_.data();
  void* y = output_.data();
  int unit = 0;
  ZS_RETURN_IF_ERROR(lender->BeginPass());
  ZS_RETURN_IF_ERROR(
      CopyAndWait(device_, tokens_.data(), tokens.data(), tokens.size() * sizeof(int32_t)));
  ZS_RETURN_IF_ERROR(WithUnit(lender, unit, [&](const LentParameters& lent) {
    return model_->embedding->Decode(context_, lent.own, length_, rows, tokens_.as<int32_t>(), x);
  }));
  for (size_t block = 0; block < model_->blocks.size(); ++block) {
    ZS_RETURN_IF_ERROR(WithUnit(lender, ++unit, [&](const LentParameters& lent) {
      return model_->blocks[block]->Decode(context_, lent.own, length_, rows, caches_[block], x, y);
    }));
    std::swap(x, y);
  }
  ZS_RETURN_IF_ERROR(WithUnit(lender, ++unit, [&](const LentParameters& lent) {
    if (!last) return absl::OkStatus();
    const int64_t row = (rows - 1) * config_.hidden * static_cast<int64_t>(SizeOf(dtype_));
    return model_->head->Logits(context_, lent.own, lent.lm_head, 1, static_cast<char*>(x) + row,
                                logits_.as<float>());
  }));
  length_ += rows;
  return absl::OkStatus();
}

absl::StatusOr<absl::Span<const float>> Generator::Step(absl::Span<const int32_t> tokens,
                                                        ParameterLender* lender) {
  const auto count = static_cast<int64_t>(tokens.size());
  if (count == 0) return absl::InvalidArgumentError("there is no token to go on from");
  if (count > capacity_ - length_) {
    return absl::OutOfRangeError(absl::StrCat(count, " more tokens after ", length_,
                                              " do not fit into ", capacity_, " positions"));
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= config_.vocab) {
      return absl::InvalidArgumentError(absl::StrCat(
          "token ", length_ + static_cast<int64_t>(i), " of the sequence is ", tokens[i],
          ", but the model's vocabulary has ", config_.vocab, "; is this the model's tokenizer?"));
    }
  }
  for (size_t at = 0; at < tokens.size(); at += static_cast<size_t>(most_rows_)) {
    const absl::Span<const int32_t> piece = tokens.subspan(at, static_cast<size_t>(most_rows_));
    ZS_RETURN_IF_ERROR(Pass(piece, at + piece.size() == tokens.size(), lender));
  }
  ZS_RETURN_IF_ERROR(CopyAndWait(device_, read_logits_.data(), logits_.data(), logits_.bytes()));
  ZS_RETURN_IF_ERROR(device_->compute()->Record().Wait());  // of the kernels that made them
  return absl::MakeConstSpan(read_logits_.as<float>(), static_cast<size_t>(config_.vocab));
}

}  // namespace zeroshard
