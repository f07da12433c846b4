#include "worker/comm/traffic.h"

#include <algorithm>
#include <numeric>

namespace zeroshard {

int64_t AllGatherBytes(int64_t count, DType type, int size) {
  return (size - 1) * count * static_cast<int64_t>(SizeOf(type));
}

int64_t ReduceScatterBytes(absl::Span<const int64_t> counts, int contributors, DType type,
                           int rank) {
  if (rank >= contributors) return 0;
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  return (total - counts[rank]) * static_cast<int64_t>(SizeOf(type));
}

int64_t AllReduceBytes(int64_t count, DType type, int size, int rank) {
  const int64_t element = static_cast<int64_t>(SizeOf(type));
  if (size == 1) return 0;
  if (count <= kDirectAllReduce) return (size - 1) * count * element;
  return (count + (size - 2) * PartCount(count, size, rank)) * element;
}

int64_t BroadcastBytes(int64_t bytes, int root, int size, int rank) {
  return rank == root ? (size - 1) * bytes : 0;
}

int64_t PartStart(int64_t count, int size, int rank) {
  return std::min(count, rank * CeilDiv(count, size));
}

int64_t PartCount(int64_t count, int size, int rank) {
  return PartStart(count, size, rank + 1) - PartStart(count, size, rank);
}

}  // namespace zeroshard
