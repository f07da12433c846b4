// MemoryState: one step over the chunks.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "common/spec/timeouts.h"
#include "common/status_macros.h"
#include "shard_store/state/memory_state.h"

namespace zeroshard::store {
namespace {

// Elements of a chunk that are one task where there are fewer chunks than threads.
constexpr int64_t kPart = int64_t{1} << 17;
// Elements that are updated and then hashed while they are in a core's cache.
constexpr int64_t kBlock = int64_t{1} << 15;

using Steady = std::chrono::steady_clock;

// For which an update waits until readers of the version before let go of a chunk. By then the
// coordinator has ended the streams of a rank that does not read.
std::chrono::seconds MostWaiting(const v1::JobSpec& spec) {
  return absl::ToChronoSeconds(StepTimeout(spec));
}

}  // namespace

struct MemoryState::Update {
  std::unique_ptr<const OptimizerStep> step;  // null: the version moves, the state does not
  std::function<void(uint32_t, uint32_t)> on_chunk;
  std::function<void(const absl::Status&)> done;
  bool in_parts = false;
  std::atomic<size_t> left = 0;  // chunks
  std::mutex mutex;
  absl::Status status;
};

struct MemoryState::ChunkUpdate {
  std::shared_ptr<Update> update;
  ChunkPtr chunk;
  std::shared_ptr<Buffer> target;  // what will be published
  std::atomic<int64_t> parts = 0;  // not done yet
  bool hashed = false;             // `digest` is of the new version
  uint32_t digest = 0;
  std::optional<Steady::time_point> waits_since;  // for memory
};

void MemoryState::Apply(const v1::StepDecision& decision,
                        std::function<void(uint32_t chunk, uint32_t digest)> on_chunk,
                        std::function<void(const absl::Status&)> done) {
  auto update = std::make_shared<Update>();
  if (!decision.skip()) update->step = MakeOptimizerStep(spec_, decision);
  update->on_chunk = std::move(on_chunk);
  update->done = std::move(done);
  std::vector<ChunkPtr> trained;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++applies_;
    for (const auto& [id, chunk] : chunks_)
      if (chunk->chunk.trained) trained.push_back(chunk);
  }
  update->left = std::max<size_t>(trained.size(), 1);
  update->in_parts = trained.size() < static_cast<size_t>(pool_->threads());
  if (trained.empty()) {
    pool_->Add([this, update] { EndChunk(update, absl::OkStatus()); });
    return;
  }
  for (ChunkPtr& chunk : trained) {
    auto one = std::make_shared<ChunkUpdate>();
    one->update = update;
    one->chunk = std::move(chunk);
    const int node = one->chunk->node;
    pool_->Add([this, one] { BeginChunk(one); }, node);
  }
}

void MemoryState::BeginChunk(const std::shared_ptr<ChunkUpdate>& one) {
  const MemoryChunk& chunk = *one->chunk;
  if (one->update->step == nullptr) {
    PublishChunk(one);
    return;
  }
  if (!LetGo(one->chunk, [this, one] { BeginChunk(one); })) return;
  const absl::Status status = ChooseTarget(one.get());
  if (absl::IsResourceExhausted(status)) {
    if (!one->waits_since) one->waits_since = Steady::now();
    if (Steady::now() - *one->waits_since < MostWaiting(spec_)) {
      retries_.Add([this, one] { BeginChunk(one); }, chunk.node);
    } else {
      LetGoAndEnd(one, TooLate(*one, status));
    }
    return;
  }
  if (!status.ok()) return LetGoAndEnd(one, status);
  const int64_t size = chunk.size();
  const int64_t part = one->update->in_parts ? kPart : size;
  one->parts = CeilDiv(size, part);
  for (int64_t begin = part; begin < size; begin += part) {
    pool_->Add(
        [this, one, begin, end = std::min(begin + part, size)] { UpdatePart(one, begin, end); },
        chunk.node);
  }
  UpdatePart(one, 0, std::min(part, size));
}

// Memory for second buffers is not reserved: whoever computed the gradients of a step has received
// the parameters that it is computed from, so that what readers still hold is on its way to being
// let go of, and soon is.
absl::Status MemoryState::ChooseTarget(ChunkUpdate* one) {
  MemoryChunk& chunk = *one->chunk;
  bool pinned = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    chunk.updating = true;  // nobody pins it from here on
    one->target = chunk.Published();
    pinned = one->target.use_count() > 2;  // the chunk's own, and the one above
  }
  if (!pinned) {
    // What a reader that let go has read happened before what is written now: to let go of one more
    // reference acquires what those released who did before. (So would a fence, of which the thread
    // sanitizer knows nothing.)
    std::shared_ptr<Buffer>(one->target).reset();
    return absl::OkStatus();
  }
  // Held here, it would look pinned by this update.
  const std::shared_ptr<Buffer> old = std::move(one->target);
  const size_t bytes = old->size();
  ZS_RETURN_IF_ERROR(budget_->Take(
      bytes, absl::StrCat("a second buffer for chunk ", chunk.id, " of job ", spec_.name())));
  ZS_ASSIGN_OR_RETURN(std::shared_ptr<Buffer> fresh, Buffer::Allocate(bytes, budget_));
  if (old == chunk.master) {  // which is read as well
    std::memcpy(fresh->data(), old->data(), bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    chunk.master = fresh;
  } else if (std::any_of(chunk.tensors.begin(), chunk.tensors.end(),
                         [](const TensorPart& part) { return !part.tensor->trainable; })) {
    std::memcpy(fresh->data(), old->data(), bytes);
  }
  one->target = std::move(fresh);
  return absl::OkStatus();
}

absl::Status MemoryState::TooLate(const ChunkUpdate& one, const absl::Status& lack) const {
  long readers = 0;
  size_t chunks = 0, bytes = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    readers = one.chunk->Published().use_count() - 1;
    for (const auto& [id, chunk] : chunks_) {
      if (!chunk->updating || chunk->Published().use_count() < 2) continue;
      ++chunks;
      bytes += chunk->Published()->size();
    }
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "for ", MostWaiting(spec_).count(), " s (timeouts.step_seconds) ", readers,
      " answers to pulls have held the parameters of chunk ", one.chunk->id, " of job ",
      spec_.name(), ", and answers hold ", chunks, " of its chunks, ", bytes,
      " bytes, in all: some rank or store does not read what it asked for; and ", lack.message()));
}

void MemoryState::UpdatePart(const std::shared_ptr<ChunkUpdate>& one, int64_t begin, int64_t end) {
  const MemoryChunk& chunk = *one->chunk;
  const bool whole = begin == 0 && end == chunk.size();
  float* const master = chunk.Kind(StateKind::kMaster);
  float* const exp_avg = chunk.Kind(StateKind::kExpAvg);
  float* const exp_avg_sq = chunk.Kind(StateKind::kExpAvgSq);
  const size_t width = SizeOf(type_);
  uint32_t digest = 0;
  auto part = chunk.tensors.begin();
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t block_end = std::min(at + kBlock, end);
    while (part != chunk.tensors.end() && part->end <= at) ++part;
    for (auto here = part; here != chunk.tensors.end() && here->begin < block_end; ++here) {
      if (!here->tensor->trainable) continue;
      const int64_t first = std::max(at, here->begin);
      UpdateRange range;
      range.size = std::min(block_end, here->end) - first;
      range.unit = chunk.chunk.unit;
      range.first = chunk.chunk.begin + first;
      range.decay = here->tensor->decay;
      range.gradient = chunk.staging->data() + static_cast<size_t>(first) * width;
      range.gradient_type = type_;
      range.master = master + first;
      range.exp_avg = exp_avg + first;
      range.exp_avg_sq = exp_avg_sq == nullptr ? nullptr : exp_avg_sq + first;
      range.parameters = one->target->data() + static_cast<size_t>(first) * width;
      range.parameter_type = type_;
      one->update->step->Update(range);
    }
    if (digests_ && whole)
      digest = ExtendCrc32c(digest, master + at, static_cast<size_t>(block_end - at) * 4);
  }
  if (whole) {
    one->digest = digest;
    one->hashed = true;
  }
  if (--one->parts == 0) PublishChunk(one);
}

void MemoryState::PublishChunk(const std::shared_ptr<ChunkUpdate>& one) {
  MemoryChunk& chunk = *one->chunk;
  if (one->target != nullptr) {
    // What was published before, where a reader has just let go of it, ends outside the lock.
    std::lock_guard<std::mutex> lock(mutex_);
    chunk.Published().swap(one->target);
    chunk.updating = false;
  }
  one->target = nullptr;
  if (digests_ && !one->hashed)
    one->digest = Crc32c(chunk.master->data(), static_cast<size_t>(chunk.size()) * sizeof(float));
  one->update->on_chunk(chunk.id, one->digest);
  LetGoAndEnd(one, absl::OkStatus());
}

void MemoryState::LetGoAndEnd(const std::shared_ptr<ChunkUpdate>& one, const absl::Status& status) {
  // The task that runs this may live on for a moment after the last chunk's end was told, when the
  // memory of a job that is over is to be free.
  one->target = nullptr;
  one->chunk = nullptr;
  EndChunk(one->update, status);
}

void MemoryState::EndChunk(const std::shared_ptr<Update>& update, const absl::Status& status) {
  if (!status.ok()) {
    std::lock_guard<std::mutex> lock(update->mutex);
    if (update->status.ok()) update->status = status;
  }
  if (--update->left > 0) return;
  absl::Status result;
  {
    std::lock_guard<std::mutex> lock(update->mutex);
    result = update->status;
  }
  update->done(result);
  std::lock_guard<std::mutex> lock(mutex_);
  --applies_;
  changed_.notify_all();
}

}  // namespace zeroshard::store
