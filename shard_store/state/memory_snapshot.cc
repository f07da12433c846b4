// MemoryState: a version kept and written while the next steps are applied.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/store.h"
#include "common/log.h"
#include "common/spec/timeouts.h"
#include "common/status_macros.h"
#include "shard_store/state/memory_state.h"
#include "shard_store/state/writer_buffer.h"

namespace zeroshard::store {
namespace {

constexpr size_t kMostCopies = 4;  // chunks

}  // namespace

struct MemoryState::Snapshot {
  v1::SnapshotOrder order;
  absl::Status status;  // of the order

  // Guarded by the state's mutex. What is given up keeps no memory.
  bool ended = false;
  std::vector<ChunkPtr> chunks;               // that are written, by number
  std::vector<std::shared_ptr<Buffer>> free;  // room for a copy each
  std::map<uint32_t, std::shared_ptr<Buffer>> copies;
};

void MemoryState::PreserveSnapshot(const v1::SnapshotOrder& order) {
  EndSnapshot();
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->order = order;
  std::vector<uint32_t> ids(order.chunks().begin(), order.chunks().end());
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  absl::StatusOr<std::vector<ChunkPtr>> found = FindAll(ids);
  snapshot->status = found.status();
  if (found.ok()) snapshot->chunks = *std::move(found);
  uint64_t room = 0;
  size_t trained = 0;
  for (const ChunkPtr& chunk : snapshot->chunks) {
    if (!chunk->chunk.trained) continue;
    ++trained;
    room = std::max<uint64_t>(room, chunk->master->size() + chunk->exp_avg->size() +
                                        (momentum_only_ ? 0 : chunk->exp_avg_sq->size()));
  }
  // As many as there is memory for: without a copy an update waits until its chunk is written.
  for (size_t i = 0; i < std::min(trained, kMostCopies); ++i) {
    if (!budget_->Take(room, "a copy for a snapshot").ok()) break;
    auto copy = Buffer::Allocate(static_cast<size_t>(room), budget_);
    if (!copy.ok()) break;
    snapshot->free.push_back(*std::move(copy));
  }
  std::unique_lock<std::mutex> lock(mutex_);
  // A writer that was given up reads a chunk to its end, within milliseconds.
  changed_.wait(lock, [this] { return reading_ == 0; });
  for (const ChunkPtr& chunk : snapshot->chunks)
    if (chunk->chunk.trained) chunk->hold = SnapshotHold::kPending;
  snapshot_ = std::move(snapshot);
}

bool MemoryState::LetGo(const ChunkPtr& chunk, std::function<void()> retry) {
  std::shared_ptr<Snapshot> snapshot;
  std::shared_ptr<Buffer> copy;
  std::unique_lock<std::mutex> lock(mutex_);
  if (chunk->hold == SnapshotHold::kNone || chunk->hold == SnapshotHold::kCopied) return true;
  if (chunk->hold != SnapshotHold::kPending || snapshot_->free.empty()) {
    aside_[chunk->id] = std::move(retry);
    return false;
  }
  snapshot = snapshot_;
  copy = std::move(snapshot->free.back());
  snapshot->free.pop_back();
  chunk->hold = SnapshotHold::kCopying;
  lock.unlock();
  char* out = copy->data();
  for (const auto& buffer : {chunk->master, chunk->exp_avg, chunk->exp_avg_sq}) {
    if (buffer == nullptr) continue;
    std::memcpy(out, buffer->data(), buffer->size());
    out += buffer->size();
  }
  lock.lock();
  if (snapshot->ended) {
    chunk->hold = SnapshotHold::kNone;
  } else {
    chunk->hold = SnapshotHold::kCopied;
    snapshot->copies[chunk->id] = std::move(copy);
  }
  changed_.notify_all();
  return true;
}

void MemoryState::Resume(uint32_t chunk) {
  const auto found = aside_.find(chunk);
  if (found == aside_.end()) return;
  const auto node = chunks_.find(chunk);
  pool_->Add(std::move(found->second), node == chunks_.end() ? -1 : node->second->node);
  aside_.erase(found);
}

void MemoryState::ResumeOnePending() {
  for (const auto& [id, task] : aside_) {
    const auto found = chunks_.find(id);
    if (found == chunks_.end() || found->second->hold != SnapshotHold::kPending) continue;
    Resume(id);
    return;
  }
}

void MemoryState::EndSnapshot() {
  Snapshot gone;  // memory goes outside the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const std::shared_ptr<Snapshot> snapshot = std::move(snapshot_);
  snapshot_ = nullptr;
  if (snapshot == nullptr) return;
  snapshot->ended = true;
  for (const ChunkPtr& chunk : snapshot->chunks) {
    if (chunk->hold == SnapshotHold::kPending || chunk->hold == SnapshotHold::kCopied)
      chunk->hold = SnapshotHold::kNone;
    if (chunk->hold == SnapshotHold::kNone) Resume(chunk->id);
  }
  gone.chunks.swap(snapshot->chunks);
  gone.free.swap(snapshot->free);
  gone.copies.swap(snapshot->copies);
  changed_.notify_all();
}

// Goes through the chunks in order, and of each through its kinds, one of which is in a buffer of
// the writer's own: a file that does not get on holds no chunk and no copy.
class MemoryState::SnapshotWriter {
 public:
  SnapshotWriter(MemoryState* state, std::shared_ptr<Snapshot> snapshot,
                 const std::function<void(uint64_t)>& progress, const std::atomic<bool>* stop)
      : state_(*state), snapshot_(std::move(snapshot)), progress_(progress), stop_(stop) {}

  absl::StatusOr<CheckpointFile> Write(FileSystem* files) {
    ZS_RETURN_IF_ERROR(snapshot_->status);
    ZS_RETURN_IF_ERROR(MakePieces());
    ZS_ASSIGN_OR_RETURN(
        CheckpointFile file,
        WriteStateFile(files, snapshot_->order.folder(), static_cast<int>(snapshot_->order.index()),
                       static_cast<int>(snapshot_->order.count()), pieces_,
                       [this](size_t piece) { return Values(piece); }));
    // Those without a piece are part of the digests too.
    while (next_ < sections_.size()) ZS_RETURN_IF_ERROR(Advance());
    return file;
  }
  const WeightDigest& digest(int kind) const { return digests_[kind]; }

 private:
  struct Section {
    size_t chunk = 0;  // index
    StateKind kind = StateKind::kMaster;
    Chunk where;
    bool last = false;  // of its chunk
  };
  struct Place {
    size_t section = 0;  // index
    int64_t begin = 0;
  };

  absl::Status MakePieces() {
    std::vector<ChunkPtr> chunks;
    {
      std::lock_guard<std::mutex> lock(state_.mutex_);
      chunks = snapshot_->chunks;
    }
    int64_t largest = 0;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const MemoryChunk& chunk = *chunks[i];
      largest = std::max(largest, chunk.size());
      for (int k = 0; k < kStateKinds; ++k) {
        const auto kind = static_cast<StateKind>(k);
        if (!chunk.Has(kind)) continue;
        sections_.push_back({i, kind, chunk.chunk, false});
        for (const TensorPart& part : chunk.tensors) {
          if (kind != StateKind::kMaster && !part.tensor->trainable) continue;
          pieces_.push_back({.kind = kind,
                             .tensor = part.tensor->name,
                             .shape = part.tensor->shape,
                             .begin = part.in_tensor,
                             .end = part.in_tensor + (part.end - part.begin)});
          places_.push_back({sections_.size() - 1, part.begin});
        }
      }
      // A chunk of which nothing is kept has none.
      if (!sections_.empty() && sections_.back().chunk == i) sections_.back().last = true;
    }
    ZS_ASSIGN_OR_RETURN(
        values_, TakeWriterBuffer(static_cast<size_t>(largest) * sizeof(float), state_.writing_,
                                  stop_, WriterPatience(state_.spec_)));
    return absl::OkStatus();
  }

  absl::StatusOr<const float*> Values(size_t piece) {
    if (stop_ != nullptr && *stop_) return absl::CancelledError("the snapshot was given up");
    while (next_ <= places_[piece].section) ZS_RETURN_IF_ERROR(Advance());
    if (progress_) {
      progress_(static_cast<uint64_t>(pieces_[piece].end - pieces_[piece].begin) * sizeof(float));
    }
    return values_->as<float>() + places_[piece].begin;
  }

  // Reads the next section; a chunk of which all were read may change.
  absl::Status Advance() {
    const Section& section = sections_[next_];
    const auto values =
        absl::MakeSpan(values_->as<float>(), static_cast<size_t>(section.where.size()));
    ZS_RETURN_IF_ERROR(Read(section, values));
    ++next_;
    digests_[static_cast<int>(section.kind)].Add(static_cast<uint64_t>(section.where.unit),
                                                 static_cast<uint64_t>(section.where.begin),
                                                 values);
    return absl::OkStatus();
  }

  absl::Status Read(const Section& section, absl::Span<float> values) {
    ChunkPtr chunk;  // these two go outside the lock
    std::shared_ptr<Buffer> copy;
    std::unique_lock<std::mutex> lock(state_.mutex_);
    // A copy takes milliseconds.
    state_.changed_.wait(lock, [&] {
      return snapshot_->ended || snapshot_->chunks[section.chunk]->hold != SnapshotHold::kCopying;
    });
    if (snapshot_->ended) return absl::CancelledError("the snapshot was given up");
    chunk = snapshot_->chunks[section.chunk];
    const auto copied = snapshot_->copies.find(chunk->id);
    if (copied != snapshot_->copies.end()) copy = copied->second;
    const bool reads = copy == nullptr && chunk->chunk.trained;
    if (reads) {
      chunk->hold = SnapshotHold::kReading;
      ++state_.reading_;
    }
    lock.unlock();
    if (copy != nullptr) {
      const float* at = copy->as<float>();
      for (int kind = 0; kind < static_cast<int>(section.kind); ++kind)
        if (chunk->Kind(static_cast<StateKind>(kind)) != nullptr) at += chunk->size();
      std::memcpy(values.data(), at, values.size() * sizeof(float));
    } else {
      chunk->Read(section.kind, 0, values);
    }
    lock.lock();
    if (reads) {
      --state_.reading_;
      const bool done = section.last || snapshot_->ended;
      chunk->hold = done ? SnapshotHold::kNone : SnapshotHold::kPending;
      if (done || !snapshot_->free.empty()) state_.Resume(chunk->id);
      state_.changed_.notify_all();
    } else if (copy != nullptr && section.last && !snapshot_->ended) {
      snapshot_->copies.erase(chunk->id);
      chunk->hold = SnapshotHold::kNone;
      snapshot_->free.push_back(std::move(copy));
      state_.ResumeOnePending();
    }
    lock.unlock();
    return absl::OkStatus();
  }

  MemoryState& state_;
  const std::shared_ptr<Snapshot> snapshot_;
  const std::function<void(uint64_t)>& progress_;
  const std::atomic<bool>* const stop_;
  std::vector<Section> sections_;
  std::vector<StatePiece> pieces_;
  std::vector<Place> places_;
  size_t next_ = 0;                 // sections before it were read
  std::shared_ptr<Buffer> values_;  // the largest section
  WeightDigest digests_[kStateKinds];
};

v1::SnapshotReport MemoryState::WriteSnapshot(FileSystem* files,
                                              const std::function<void(uint64_t)>& progress,
                                              const std::atomic<bool>* stop) {
  std::shared_ptr<Snapshot> snapshot;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    snapshot = snapshot_;
  }
  v1::SnapshotReport report;
  report.set_done(true);
  if (snapshot == nullptr) {
    report.set_problem("the snapshot was given up");
    return report;
  }
  report.set_step(snapshot->order.step());
  SnapshotWriter writer(this, snapshot, progress, stop);
  const absl::StatusOr<CheckpointFile> file = writer.Write(files);
  if (!file.ok()) {
    report.set_problem(std::string(file.status().message()));
    return report;
  }
  report.set_file(file->name);
  report.set_bytes(file->bytes);
  report.set_crc32c(file->crc32c);
  for (int kind = 0; kind < kStateKinds; ++kind) {
    report.add_digests(writer.digest(kind).low);
    report.add_digests(writer.digest(kind).high);
  }
  return report;
}

}  // namespace zeroshard::store
