// One chunk in memory. Plain data; who may touch what when is MemoryState's matter.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/manifest.h"
#include "common/plan/chunk_table.h"
#include "common/rounding.h"
#include "common/types.h"
#include "shard_store/state/buffer.h"

namespace zeroshard::store {

// The part of a tensor that lies in a chunk. The rest of a chunk is padding: zeros, never changed.
struct TensorPart {
  const ParameterInfo* tensor = nullptr;
  int64_t begin = 0, end = 0;  // elements from the chunk's begin
  int64_t in_tensor = 0;       // element of the tensor at `begin`
};

// What a snapshot that is being written still wants of a chunk.
enum class SnapshotHold : uint8_t {
  kNone,
  kPending,  // not all read yet: to be copied before it changes
  kCopying,  // that is being done
  kCopied,
  kReading,  // by the writer, into a buffer of its own: must not change
};

struct MemoryChunk {
  uint32_t id = 0;
  Chunk chunk;
  int node = -1;  // NUMA; -1: any
  DType type = DType::kF32;
  Rounding rounding;  // of the chunk's master weights, from its begin on
  std::vector<TensorPart> tensors;

  // Null where ChunkBytes has 0 bytes of the kind.
  std::shared_ptr<Buffer> master, exp_avg, exp_avg_sq, parameters, staging;

  // Guarded by MemoryState's mutex; so is replacing `master` or `parameters`.
  bool updating = false;
  SnapshotHold hold = SnapshotHold::kNone;

  int64_t size() const { return chunk.size(); }
  // What workers pull: the master weights where the compute type is theirs.
  std::shared_ptr<Buffer>& Published() { return parameters != nullptr ? parameters : master; }
  // A frozen chunk in 16 bits, whose fp32 values are those converted.
  bool Rounded() const { return master == nullptr; }
  // Null where there is none; of a rounded chunk there is no master.
  float* Kind(StateKind kind) const;
  bool Has(StateKind kind) const { return Kind(kind) != nullptr || IsRoundedMaster(kind); }
  bool IsRoundedMaster(StateKind kind) const { return kind == StateKind::kMaster && Rounded(); }
  // fp32 values of a kind that it has, elements [begin, begin + out.size()).
  void Read(StateKind kind, int64_t begin, absl::Span<float> out) const;
  void Write(StateKind kind, int64_t begin, absl::Span<const float> values);
  // The parameters, from the master weights.
  void RoundParameters();
};

// Without buffers; `rounding` is the job's. INVALID_ARGUMENT: the model has no such elements.
absl::StatusOr<std::shared_ptr<MemoryChunk>> DescribeChunk(uint32_t id, const Chunk& chunk,
                                                           const ModelTable& model, DType type,
                                                           const Rounding& rounding);
// Their buffers, of bytes taken from `budget` here, all or none. RESOURCE_EXHAUSTED names `what`,
// the bytes wanted, free and allowed.
absl::Status AllocateChunks(const std::vector<std::shared_ptr<MemoryChunk>>& chunks,
                            bool momentum_only, const std::string& what, MemoryBudget* budget);

}  // namespace zeroshard::store
