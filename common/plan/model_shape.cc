#include "common/plan/model_shape.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"

namespace zeroshard {
namespace {

constexpr double kLeast = 1e7, kMost = 2e13;
constexpr int64_t kHeadDim = 128;
constexpr int64_t kMostHidden = 65536, kMostLayers = 4096;
constexpr double kRatio = 128;  // hidden / layers
constexpr double kOff = 0.015;  // of the count
// From these on in steps that a mesh of 8 and 4 divides.
constexpr int64_t kLargeHidden = 4096, kHiddenStep = 1024;
constexpr int64_t kManyLayers = 32, kLayerStep = 4;

struct Shape {
  int64_t hidden = 0, layers = 0;
};

Shape Nearest(double parameters, const ShapeOptions& options) {
  Shape shape;
  double best = std::numeric_limits<double>::infinity();
  for (int64_t h = kHeadDim; h <= kMostHidden; h += h < kLargeHidden ? kHeadDim : kHiddenStep) {
    const double c = static_cast<double>(h);
    const double around = static_cast<double>(options.vocab + options.sequence) * c + 2 * c;
    const double block = 12 * c * c + 13 * c;
    const double fit = (parameters - around) / block;
    const int64_t step = fit < kManyLayers ? 1 : kLayerStep;
    const int64_t l = std::llround(fit / static_cast<double>(step)) * step;
    if (l < 1 || l > kMostLayers) continue;
    const double off = std::abs(around + static_cast<double>(l) * block - parameters);
    if (h >= kLargeHidden && off > kOff * parameters) continue;
    const double distance = std::abs(std::log(c / (kRatio * static_cast<double>(l))));
    if (distance >= best) continue;
    best = distance;
    shape = {h, l};
  }
  return shape;
}

}  // namespace

absl::StatusOr<v1::ModelSpec> ShapeOf(double parameters, const ShapeOptions& options) {
  if (!(parameters >= kLeast && parameters <= kMost)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "seen %g parameters, wanted 10 million to 20 trillion; smaller models are planned from a "
        "job file",
        parameters));
  }
  const Shape shape = Nearest(parameters, options);
  if (shape.hidden == 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "no GPT-2 of %g parameters has a vocabulary of %d: its embedding alone is larger; give a "
        "smaller vocabulary, or plan a job file",
        parameters, options.vocab));
  }
  v1::ModelSpec spec;
  spec.set_architecture("gpt2");
  spec.set_hidden_size(static_cast<uint32_t>(shape.hidden));
  spec.set_layers(static_cast<uint32_t>(shape.layers));
  spec.set_heads(static_cast<uint32_t>(shape.hidden / kHeadDim));
  spec.set_sequence_length(static_cast<uint32_t>(options.sequence));
  spec.set_vocab_size(static_cast<uint32_t>(options.vocab));
  return spec;
}

}  // namespace zeroshard
