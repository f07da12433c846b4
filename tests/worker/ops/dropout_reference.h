// The mask that worker/ops/dropout.h describes, one element at a time.
#pragma once

#include <cstdint>

#include "common/kernels/philox.h"
#include "worker/ops/ops.h"

namespace zeroshard {

// Of the call's element of a sample.
inline double DropoutFactor(const DropoutArgs& args, int64_t sample, int64_t element) {
  if (args.rate == 0) return 1;
  element += args.first_element;
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  const auto high = [](uint64_t x) { return static_cast<uint32_t>(x >> 32); };
  const auto s = static_cast<uint64_t>(sample), block = static_cast<uint64_t>(element) / 4;
  const cpu::PhiloxCounter stream = cpu::Philox4x32(
      {low(args.step), high(args.step), low(s), high(s)}, {low(args.seed), high(args.seed)});
  const cpu::PhiloxCounter words = cpu::Philox4x32(
      {low(block), high(block), stream[2] ^ args.site, stream[3]}, {stream[0], stream[1]});
  const double uniform = words[static_cast<uint64_t>(element) % 4] / 0x1p32;
  const double rate = args.rate;
  return uniform < rate ? 0 : static_cast<float>(1 / (1 - rate));
}

}  // namespace zeroshard
