#include "common/plan/chunk_table.h"

#include <algorithm>
#include <cstddef>

namespace zeroshard {

ChunkTable ChunkTable::Make(const ModelTable& model, int64_t chunk_elements) {
  ChunkTable table;
  table.chunk_elements = chunk_elements;
  table.chunks.reserve(static_cast<size_t>(ChunkCount(model, chunk_elements)));
  for (size_t u = 0; u < model.units.size(); ++u) {
    const UnitTable& unit = model.units[u];
    const bool trained = unit.AnyTrainable();
    table.first.push_back(static_cast<int>(table.chunks.size()));
    for (int64_t begin = 0; begin < unit.length; begin += chunk_elements) {
      table.chunks.push_back({.unit = static_cast<int>(u),
                              .begin = begin,
                              .end = std::min(unit.length, begin + chunk_elements),
                              .trained = trained});
    }
  }
  table.first.push_back(static_cast<int>(table.chunks.size()));
  return table;
}

int64_t ChunkCount(const ModelTable& model, int64_t chunk_elements) {
  int64_t count = 0;
  for (const UnitTable& unit : model.units) count += CeilDiv(unit.length, chunk_elements);
  return count;
}

int ChunkTable::Find(int unit, int64_t element) const {
  return first[static_cast<size_t>(unit)] + static_cast<int>(element / chunk_elements);
}

ChunkBytes BytesOf(const Chunk& chunk, DType type, bool momentum_only) {
  const uint64_t n = static_cast<uint64_t>(chunk.size());
  ChunkBytes bytes;
  if (chunk.trained || type == DType::kF32) bytes.master = 4 * n;
  if (type != DType::kF32) bytes.parameters = SizeOf(type) * n;
  if (!chunk.trained) return bytes;
  bytes.exp_avg = 4 * n;
  if (!momentum_only) bytes.exp_avg_sq = 4 * n;
  bytes.staging = SizeOf(type) * n;
  return bytes;
}

}  // namespace zeroshard
