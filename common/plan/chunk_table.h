// The state of an offloaded job in chunks: fixed runs of 2^20 elements of each unit's flat vector,
// whatever the number of ranks and stores. A chunk is the unit of placement, versioning,
// replication, checksum and paging (architecture, section 6). Pure arithmetic; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "common/plan/model_table.h"
#include "common/types.h"

namespace zeroshard {

constexpr int64_t kChunkElements = int64_t{1} << 20;
// Offloaded jobs of more (4.4e12 elements) are refused by common/spec.
constexpr int64_t kMaxChunks = int64_t{1} << 22;

struct Chunk {
  int unit = 0;
  int64_t begin = 0, end = 0;  // elements of the unit's flat vector
  bool trained = true;         // something in its unit is: gradients are staged, there are moments
  int64_t size() const { return end - begin; }
};

struct ChunkTable {
  std::vector<Chunk> chunks;  // by unit, then by offset
  std::vector<int> first;     // by unit: its first chunk; then the number of chunks
  int64_t chunk_elements = kChunkElements;

  // `chunk_elements` other than the default: tests alone.
  static ChunkTable Make(const ModelTable& model, int64_t chunk_elements = kChunkElements);
  // The chunk that an element lies in; it must be within the unit.
  int Find(int unit, int64_t element) const;
};

// How many chunks the table will have, before anything of that size is allocated.
int64_t ChunkCount(const ModelTable& model, int64_t chunk_elements = kChunkElements);

// What a store holds of a chunk, by kind, in bytes.
struct ChunkBytes {
  uint64_t master = 0, exp_avg = 0, exp_avg_sq = 0;
  uint64_t parameters = 0;  // in 16 bits; 0 in fp32 jobs, whose parameters are the master weights
  uint64_t staging = 0;     // of the wire type
  uint64_t State() const { return master + exp_avg + exp_avg_sq + parameters; }
  uint64_t Total() const { return State() + staging; }
};

// `momentum_only`: SGD, which keeps no second moment (and no first where momentum is 0, yet room
// for it is kept). Chunks of frozen units keep parameters in the compute type alone.
ChunkBytes BytesOf(const Chunk& chunk, DType type, bool momentum_only);

}  // namespace zeroshard
