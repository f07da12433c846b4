#include "shard_store/state/job_state.h"

#include <utility>

#include "common/plan/nvme_bytes.h"
#include "common/plan/offload.h"
#include "common/plan/zero_policy.h"
#include "common/status_macros.h"
#include "shard_store/state/memory_state.h"
#include "shard_store/state/nvme_state.h"

namespace zeroshard::store {
namespace {

ChunkBytes BytesOfChunk(const v1::JobSpec& spec, const Chunk& chunk) {
  return zeroshard::BytesOf(chunk, ComputeType(spec), UsesSgd(spec));
}

}  // namespace

absl::StatusOr<std::unique_ptr<JobState>> JobState::Create(const JobStateOptions& options) {
  std::unique_ptr<JobState> state;
  if (UsesNvme(options.spec)) {
    ZS_ASSIGN_OR_RETURN(state, NvmeState::Make(options));
  } else {
    state = std::make_unique<MemoryState>(options);
  }
  ZS_RETURN_IF_ERROR(state->Change(options.chunks, {}));
  return state;
}

absl::StatusOr<JobState::ParameterRead> JobState::BeginRead(uint32_t chunk, int64_t begin,
                                                            int64_t count, uint64_t) {
  ZS_ASSIGN_OR_RETURN(PinnedParameters pinned, Parameters(chunk, begin, count));
  return [pinned = std::move(pinned)](
             const std::function<void(absl::StatusOr<PinnedParameters>)>& done) mutable {
    done(std::move(pinned));
  };
}

uint64_t BytesOf(const JobStateOptions& options) {
  if (UsesNvme(options.spec)) return NvmeMemoryBytes(options.nvme.chunk_elements);
  uint64_t bytes = 0;
  for (const auto& [id, chunk] : options.chunks) bytes += BytesOfChunk(options.spec, chunk).Total();
  return bytes;
}

uint64_t DiskBytesOf(const JobStateOptions& options) {
  if (!UsesNvme(options.spec) || options.chunks.empty()) return 0;
  int64_t largest = 0;
  uint64_t bytes = 0;
  for (const auto& [id, chunk] : options.chunks) {
    if (BytesOfChunk(options.spec, chunk).master != 0) largest = std::max(largest, chunk.size());
    bytes += NvmeBytesOf(chunk.size(), BytesOfChunk(options.spec, chunk));
  }
  return bytes + NvmeFixedBytes(largest);
}

bool IsOfTheState(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
      return false;
    default:
      return true;
  }
}

}  // namespace zeroshard::store
