#include "shard_store/state/memory_state.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/offload.h"
#include "common/plan/zero_policy.h"
#include "common/status_macros.h"
#include "shard_store/state/chunk_batch.h"

namespace zeroshard::store {
namespace {

// Elements read at once; as many are in memory beside the limit for each thread that fills chunks.
constexpr int64_t kPiece = int64_t{1} << 16;

}  // namespace

MemoryState::MemoryState(const JobStateOptions& options)
    : spec_(options.spec),
      model_(options.model),
      digests_(options.digests),
      budget_(options.budget),
      writing_(options.writing != nullptr ? options.writing : options.budget),
      pool_(options.pool),
      type_(ComputeType(options.spec)),
      momentum_only_(UsesSgd(options.spec)) {}

MemoryState::~MemoryState() {
  EndSnapshot();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return applies_ == 0; });
}

bool MemoryState::Free() {
  EndSnapshot();
  std::map<uint32_t, ChunkPtr> chunks;
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return applies_ == 0; });
  chunks.swap(chunks_);
  lock.unlock();
  return true;
}

absl::Status MemoryState::Change(const std::map<uint32_t, Chunk>& chunks,
                                 absl::Span<const uint32_t> keep) {
  std::map<uint32_t, ChunkPtr> kept;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const uint32_t id : keep) {
      const auto found = chunks_.find(id);
      if (found != chunks_.end() && chunks.contains(id)) kept.insert(*found);
    }
    chunks_.swap(kept);
  }
  kept.clear();  // those that go: their bytes are free before others are taken
  std::vector<ChunkPtr> made;
  for (const auto& [id, chunk] : chunks) {
    if (Find(id).ok()) continue;
    ZS_ASSIGN_OR_RETURN(ChunkPtr described,
                        DescribeChunk(id, chunk, *model_, type_, MakeRounding(spec_)));
    made.push_back(std::move(described));
  }
  PlaceOnNodes(made);
  ZS_RETURN_IF_ERROR(AllocateChunks(
      made, momentum_only_,
      absl::StrCat("the state of ", made.size(), " chunks of job ", spec_.name()), budget_));
  {
    // From here on they are held, and counted.
    std::lock_guard<std::mutex> lock(mutex_);
    for (const ChunkPtr& chunk : made) chunks_[chunk->id] = chunk;
  }
  const absl::Status touched = Touch(made);
  if (touched.ok()) return touched;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const ChunkPtr& chunk : made) chunks_.erase(chunk->id);
  return touched;
}

void MemoryState::PlaceOnNodes(const std::vector<ChunkPtr>& chunks) const {
  const auto bytes_of = [this](const MemoryChunk& chunk) {
    return zeroshard::BytesOf(chunk.chunk, type_, momentum_only_).Total();
  };
  std::vector<uint64_t> held(static_cast<size_t>(pool_->nodes())), bytes;
  for (const ChunkPtr& chunk : chunks) bytes.push_back(bytes_of(*chunk));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, chunk] : chunks_)
      held[static_cast<size_t>(chunk->node)] += bytes_of(*chunk);
  }
  const std::vector<int> nodes = SpreadOverNodes(bytes, pool_->threads_of_nodes(), held);
  for (size_t i = 0; i < chunks.size(); ++i) chunks[i]->node = nodes[i];
}

absl::Status MemoryState::Touch(const std::vector<ChunkPtr>& chunks) const {
  return ForEachChunk(pool_, chunks, [](MemoryChunk* chunk) {
    for (const auto& buffer :
         {chunk->master, chunk->exp_avg, chunk->exp_avg_sq, chunk->parameters, chunk->staging})
      if (buffer != nullptr) buffer->Touch();
    return absl::OkStatus();
  });
}

absl::StatusOr<MemoryState::ChunkPtr> MemoryState::Find(uint32_t chunk) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = chunks_.find(chunk);
  if (found != chunks_.end()) return found->second;
  return absl::InvalidArgumentError(absl::StrCat("chunk ", chunk, " of job ", spec_.name(),
                                                 " is not on this store, which holds ",
                                                 chunks_.size(), " others"));
}

absl::StatusOr<MemoryState::ChunkPtr> MemoryState::Find(uint32_t id, int64_t begin,
                                                        int64_t count) const {
  ZS_ASSIGN_OR_RETURN(ChunkPtr chunk, Find(id));
  if (begin >= 0 && count >= 0 && begin <= chunk->size() && count <= chunk->size() - begin)
    return chunk;
  return absl::InvalidArgumentError(absl::StrCat("chunk ", id, " of job ", spec_.name(), ": ",
                                                 count, " elements from ", begin,
                                                 " on; wanted some of its ", chunk->size()));
}

absl::StatusOr<MemoryState::ChunkPtr> MemoryState::FindKind(uint32_t id, StateKind kind,
                                                            int64_t begin, int64_t count) const {
  ZS_ASSIGN_OR_RETURN(ChunkPtr chunk, Find(id, begin, count));
  if (chunk->Has(kind)) return chunk;
  return absl::InvalidArgumentError(
      absl::StrCat("chunk ", id, " of job ", spec_.name(), " has no ", NameOf(kind)));
}

absl::StatusOr<std::vector<MemoryState::ChunkPtr>> MemoryState::FindAll(
    absl::Span<const uint32_t> chunks) const {
  std::vector<ChunkPtr> found;
  for (const uint32_t id : chunks) {
    ZS_ASSIGN_OR_RETURN(ChunkPtr chunk, Find(id));
    found.push_back(std::move(chunk));
  }
  return found;
}

absl::Status MemoryState::FillChunk(const Sources& sources, const std::atomic<bool>* stop,
                                    MemoryChunk* chunk) const {
  const std::pair<StateKind, const ParameterSource*> kinds[] = {
      {StateKind::kMaster, sources.master},
      {StateKind::kExpAvg, sources.exp_avg},
      {StateKind::kExpAvgSq, sources.exp_avg_sq}};
  std::vector<float> piece;
  for (const auto& [kind, source] : kinds) {
    if (source == nullptr || !chunk->Has(kind)) continue;
    for (const TensorPart& part : chunk->tensors) {
      if (kind != StateKind::kMaster && !part.tensor->trainable) continue;
      for (int64_t at = part.begin; at < part.end; at += kPiece) {
        if (stop != nullptr && *stop) return absl::CancelledError("stopped while loading");
        const int64_t n = std::min(kPiece, part.end - at);
        const int64_t from = part.in_tensor + (at - part.begin);
        if (!chunk->IsRoundedMaster(kind)) {
          ZS_RETURN_IF_ERROR(source->Read(*part.tensor, from, from + n, chunk->Kind(kind) + at));
          continue;
        }
        piece.resize(static_cast<size_t>(n));
        ZS_RETURN_IF_ERROR(source->Read(*part.tensor, from, from + n, piece.data()));
        chunk->Write(kind, at, piece);
      }
    }
  }
  chunk->RoundParameters();
  return absl::OkStatus();
}

absl::Status MemoryState::Fill(const Sources& sources, absl::Span<const uint32_t> chunks,
                               const std::function<void(uint32_t)>& on_chunk,
                               const std::atomic<bool>* stop) {
  ZS_ASSIGN_OR_RETURN(const std::vector<ChunkPtr> wanted, FindAll(chunks));
  return ForEachChunk(
      pool_, wanted,
      [&](MemoryChunk* chunk) {
        ZS_RETURN_IF_ERROR(FillChunk(sources, stop, chunk));
        sources.master->DropPages();
        if (on_chunk) on_chunk(chunk->id);
        return absl::OkStatus();
      },
      stop);
}

bool MemoryState::HasKind(uint32_t id, StateKind kind) const {
  const absl::StatusOr<ChunkPtr> chunk = Find(id);
  return chunk.ok() && (*chunk)->Has(kind);
}

absl::Status MemoryState::SetState(uint32_t id, StateKind kind, int64_t begin,
                                   absl::Span<const float> values) {
  ZS_ASSIGN_OR_RETURN(const ChunkPtr chunk,
                      FindKind(id, kind, begin, static_cast<int64_t>(values.size())));
  chunk->Write(kind, begin, values);
  return absl::OkStatus();
}

absl::Status MemoryState::FinishChunk(uint32_t id) {
  ZS_ASSIGN_OR_RETURN(const ChunkPtr chunk, Find(id));
  chunk->RoundParameters();
  return absl::OkStatus();
}

absl::Status MemoryState::GetState(uint32_t id, StateKind kind, int64_t begin,
                                   absl::Span<float> values) const {
  ZS_ASSIGN_OR_RETURN(const ChunkPtr chunk,
                      FindKind(id, kind, begin, static_cast<int64_t>(values.size())));
  chunk->Read(kind, begin, values);
  return absl::OkStatus();
}

absl::Status MemoryState::Stage(uint32_t id, uint64_t /*step*/, int64_t begin, int64_t count,
                                absl::Span<const absl::Span<const char>> parts) {
  ZS_ASSIGN_OR_RETURN(const ChunkPtr chunk, Find(id, begin, count));
  if (chunk->staging == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", id, " of job ", spec_.name(), " is frozen: it takes no gradients"));
  }
  const size_t wanted = static_cast<size_t>(count) * SizeOf(type_);
  size_t bytes = 0;
  for (const absl::Span<const char> part : parts) bytes += part.size();
  if (bytes != wanted) {
    return absl::InvalidArgumentError(absl::StrCat(
        "chunk ", id, " of job ", spec_.name(), ": ", bytes, " bytes of gradients for ", count,
        " elements of ", NameOf(type_), "; wanted ", wanted));
  }
  char* out = chunk->staging->data() + static_cast<size_t>(begin) * SizeOf(type_);
  for (const absl::Span<const char> part : parts) {
    if (!part.empty()) std::memcpy(out, part.data(), part.size());
    out += part.size();
  }
  return absl::OkStatus();
}

absl::StatusOr<PinnedParameters> MemoryState::Parameters(uint32_t id, int64_t begin,
                                                         int64_t count) {
  ZS_ASSIGN_OR_RETURN(const ChunkPtr chunk, Find(id, begin, count));
  std::lock_guard<std::mutex> lock(mutex_);
  if (chunk->updating) {
    return absl::FailedPreconditionError(
        absl::StrCat("chunk ", id, " of job ", spec_.name(), " is being updated"));
  }
  const std::shared_ptr<Buffer>& buffer = chunk->Published();
  return PinnedParameters{
      buffer, absl::MakeConstSpan(buffer->data() + static_cast<size_t>(begin) * SizeOf(type_),
                                  static_cast<size_t>(count) * SizeOf(type_))};
}

absl::StatusOr<WeightDigest> MemoryState::Digest(absl::Span<const uint32_t> chunks) const {
  ZS_ASSIGN_OR_RETURN(const std::vector<ChunkPtr> wanted, FindAll(chunks));
  std::mutex mutex;
  WeightDigest total;
  const absl::Status status = ForEachChunk(pool_, wanted, [&](MemoryChunk* chunk) {
    WeightDigest digest;
    std::vector<float> piece;
    for (int64_t at = 0; at < chunk->size(); at += kPiece) {
      piece.resize(static_cast<size_t>(std::min(kPiece, chunk->size() - at)));
      chunk->Read(StateKind::kMaster, at, absl::MakeSpan(piece));
      digest.Add(static_cast<uint64_t>(chunk->chunk.unit),
                 static_cast<uint64_t>(chunk->chunk.begin + at), piece);
    }
    std::lock_guard<std::mutex> lock(mutex);
    total.Combine(digest);
    return absl::OkStatus();
  });
  ZS_RETURN_IF_ERROR(status);
  return total;
}

v1::StoreUsage MemoryState::usage() const {
  const auto bytes = [](const std::shared_ptr<Buffer>& buffer) {
    return buffer == nullptr ? uint64_t{0} : uint64_t{buffer->size()};
  };
  v1::StoreUsage usage;
  std::lock_guard<std::mutex> lock(mutex_);
  usage.set_chunks(chunks_.size());
  for (const auto& [id, chunk] : chunks_) {
    usage.set_master_bytes(usage.master_bytes() + bytes(chunk->master));
    usage.set_exp_avg_bytes(usage.exp_avg_bytes() + bytes(chunk->exp_avg));
    usage.set_exp_avg_sq_bytes(usage.exp_avg_sq_bytes() + bytes(chunk->exp_avg_sq));
    usage.set_parameter_bytes(usage.parameter_bytes() + bytes(chunk->parameters));
    usage.set_staging_bytes(usage.staging_bytes() + bytes(chunk->staging));
  }
  return usage;
}

}  // namespace zeroshard::store
