#include "worker/comm/traffic.h"

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

int64_t BroadcastBytes(int64_t bytes, int root, int size, int rank) {
  return rank == root ? (size - 1) * bytes : 0;
}

}  // namespace zeroshard
