// The dropout masks of worker/ops/dropout.h, whose comment gives their layout, an element or a
// block of four at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/kernels/philox.h"
#include "worker/ops/cuda/host_device.h"
#include "worker/ops/ops.h"

namespace zeroshard::cuda {

// What all samples share; plain data, made on the host.
struct DropoutRule {
  cpu::PhiloxKey seed;
  uint64_t step;
  uint32_t site;
  uint32_t last_dropped;   // the largest word that drops its element
  float scale;             // of an element that is kept
  uint64_t first_element;  // of the mask, that the call's first one is
};

// Words below it are dropped. 0: there is no mask, and nothing else here is called.
inline uint64_t DropoutThreshold(const DropoutArgs& args) {
  const double rate = std::clamp(static_cast<double>(args.rate), 0.0, 1.0);
  return static_cast<uint64_t>(std::llround(rate * 0x1p32));
}

inline DropoutRule DropoutRuleOf(const DropoutArgs& args) {
  const uint64_t threshold = DropoutThreshold(args);
  const bool all = threshold >> 32 != 0;
  return {.seed = {static_cast<uint32_t>(args.seed), static_cast<uint32_t>(args.seed >> 32)},
          .step = args.step,
          .site = args.site,
          .last_dropped = static_cast<uint32_t>(threshold - 1),
          .scale = all ? 0.0f : static_cast<float>(1.0 / (1.0 - static_cast<double>(args.rate))),
          .first_element = static_cast<uint64_t>(args.first_element)};
}

// Whether four elements of the call that begin at a multiple of four are one block of the mask.
inline bool BeginsBlock(const DropoutRule& rule) { return rule.first_element % 4 == 0; }

// The mask of one sample.
struct DropoutStream {
  cpu::PhiloxKey key;
  uint32_t words[2];  // the counter after the block's number
};

ZS_HOST_DEVICE DropoutStream DropoutStreamOf(const DropoutRule& rule, uint64_t sample) {
  const cpu::PhiloxCounter stream =
      cpu::Philox4x32({static_cast<uint32_t>(rule.step), static_cast<uint32_t>(rule.step >> 32),
                       static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32)},
                      rule.seed);
  return {{stream[0], stream[1]}, {stream[2] ^ rule.site, stream[3]}};
}

// factors[i] = 0 or rule.scale, of the mask's elements 4 * block + i.
ZS_HOST_DEVICE void DropoutFactors(const DropoutRule& rule, const DropoutStream& stream,
                                   uint64_t block, float (&factors)[4]) {
  const cpu::PhiloxCounter words =
      cpu::Philox4x32({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                       stream.words[0], stream.words[1]},
                      stream.key);
  for (unsigned i = 0; i < 4; ++i) factors[i] = words[i] > rule.last_dropped ? rule.scale : 0.0f;
}

// Of the mask's element.
ZS_HOST_DEVICE float DropoutFactor(const DropoutRule& rule, const DropoutStream& stream,
                                   uint64_t element) {
  float factors[4];
  DropoutFactors(rule, stream, element / 4, factors);
  const unsigned word = static_cast<unsigned>(element % 4);  // no array in memory for this
  const float low = word & 1 ? factors[1] : factors[0];
  const float high = word & 1 ? factors[3] : factors[2];
  return word & 2 ? high : low;
}

}  // namespace zeroshard::cuda
