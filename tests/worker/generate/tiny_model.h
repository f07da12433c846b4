// The reference models in memory, and small tokenizers.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/parameter_source.h"
#include "common/tokenizer/tokenizer.h"
#include "tests/reference/reference.h"
#include "worker/generate/generator.h"
#include "worker/generate/memory_parameters.h"

namespace zeroshard {

// The initial weights of a reference model.
class ReferenceSource : public ParameterSource {
 public:
  explicit ReferenceSource(const Reference* reference) : reference_(reference) {}
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override {
    const absl::StatusOr<std::vector<float>> values = reference_->Tensor("initial", tensor.name);
    if (!values.ok()) return values.status();
    std::copy(values->begin() + begin, values->begin() + end, out);
    return absl::OkStatus();
  }

 private:
  const Reference* reference_;
};

// Each byte a token; ids from 256 on are special.
class ByteTokens : public Tokenizer {
 public:
  void Encode(absl::string_view text, std::vector<int32_t>* ids) const override {
    for (const char c : text) ids->push_back(static_cast<uint8_t>(c));
  }
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t> ids,
                                     bool skip_special) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (id < 256) {
        text.push_back(static_cast<char>(id));
      } else if (!skip_special) {
        text += "<s>";
      }
    }
    return text;
  }
  int64_t vocab_size() const override { return 258; }
  std::optional<int32_t> end_of_text() const override { return 256; }
  std::optional<int32_t> Find(absl::string_view token) const override {
    if (token == "<s>") return 257;
    if (token == "<|endoftext|>") return 256;
    return std::nullopt;
  }
  size_t SafeCut(absl::string_view text, size_t from, size_t limit) const override { return from; }
};

// A reference model that is ready to generate.
struct TinyModel {
  explicit TinyModel(const std::string& name, DType type = DType::kF32, int threads = 1,
                     int64_t capacity = 144)
      : TinyModel(name, type, MakeCpuDevice(), MakeCpuOps(threads), capacity) {}
  TinyModel(const std::string& name, DType type, std::unique_ptr<Device> on,
            std::unique_ptr<Ops> kernels, int64_t capacity = 144)
      : reference(*Reference::Load(name)),
        device(std::move(on)),
        ops(std::move(kernels)),
        model(MakeModel(reference.table(), /*checkpointing=*/false)),
        parameters(*MemoryParameters::Load(reference.table(), ReferenceSource(&reference),
                                           device.get(), type)),
        generator(*Generator::Create(&model, device.get(), ops.get(), type, capacity)) {}

  // The logits after `tokens`, given all at once or in steps of some tokens.
  std::vector<float> Logits(const std::vector<int32_t>& tokens, size_t step) {
    generator->Reset();
    std::vector<float> logits;
    for (size_t at = 0; at < tokens.size(); at += step) {
      const size_t n = std::min(step, tokens.size() - at);
      const auto got = generator->Step({tokens.data() + at, n}, parameters.get());
      if (!got.ok()) {
        ADD_FAILURE() << got.status();
        return {};
      }
      logits.assign(got->begin(), got->end());
    }
    return logits;
  }

  Reference reference;
  std::unique_ptr<Device> device;
  std::unique_ptr<Ops> ops;
  Model model;
  std::unique_ptr<MemoryParameters> parameters;
  std::unique_ptr<Generator> generator;
};

}  // namespace zeroshard
