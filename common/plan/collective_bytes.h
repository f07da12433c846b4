// What collectives send, in closed form: the communicator counts by it and the planner predicts by
// it. Bytes of payload that one rank sends to others; sizes in elements. Pure; thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/types.h"

namespace zeroshard {

// Rows and columns in the order of worker/comm's CollectiveOp and Phase.
using TrafficTable = std::array<std::array<uint64_t, 3>, 5>;
namespace traffic {
constexpr size_t kAllGather = 0, kReduceScatter = 1, kAllReduce = 2, kSend = 4;
constexpr size_t kForward = 0, kBackward = 1, kStep = 2;
}  // namespace traffic

// The first of `count` elements that `rank` of `size` reduces, and how many they are: rank r those
// of [r*S, min((r+1)*S, count)), S = ceil(count / size).
constexpr int64_t PartStart(int64_t count, int size, int rank) {
  return std::min(count, rank * CeilDiv(count, size));
}
constexpr int64_t PartCount(int64_t count, int size, int rank) {
  return PartStart(count, size, rank + 1) - PartStart(count, size, rank);
}

// Up to kDirectAllReduce elements every rank sends all to all others: (size - 1) * count elements.
// Beyond, each reduces its part and sends the sum: count + (size - 2) * own elements, that is
// 2 * count * (size-1)/size where size divides count; of two ranks that is what one round sends.
constexpr int64_t kDirectAllReduce = 4096;
constexpr int64_t AllReduceBytes(int64_t count, DType type, int size, int rank) {
  const auto element = static_cast<int64_t>(SizeOf(type));
  if (size == 1) return 0;
  if (count <= kDirectAllReduce) return (size - 1) * count * element;
  return (count + (size - 2) * PartCount(count, size, rank)) * element;
}

}  // namespace zeroshard
