// NvmeState: a version kept and written while the next steps are applied.
#include <algorithm>
#include <utility>

#include "common/checkpoint/store.h"
#include "common/spec/timeouts.h"
#include "common/status_macros.h"
#include "shard_store/state/caught.h"
#include "shard_store/state/nvme_disk.h"
#include "shard_store/state/writer_buffer.h"

namespace zeroshard::store {

struct NvmeState::Snapshot {
  v1::SnapshotOrder order;
  absl::Status status;  // of the order
  uint64_t number = 0;  // of what the file preserves
  // Guarded by the state's mutex; both are empty once it has ended, so that a writer whose file
  // does not get on keeps neither file nor buffers of the state.
  std::vector<View> chunks;  // that are written, by number
  std::shared_ptr<Disk> disk;
  bool ended = false;
};

void NvmeState::PreserveSnapshot(const v1::SnapshotOrder& order) {
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->order = order;
  std::vector<uint32_t> ids(order.chunks().begin(), order.chunks().end());
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  for (const uint32_t id : ids) {
    absl::StatusOr<View> view = Find(id);
    if (view.ok()) {
      snapshot->chunks.push_back(*std::move(view));
    } else if (snapshot->status.ok()) {
      snapshot->status = view.status();
    }
  }
  std::vector<uint32_t> others;
  std::shared_ptr<Disk> disk;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    disk = disk_;
    for (const auto& [id, chunk] : chunks_)
      if (!std::binary_search(ids.begin(), ids.end(), id)) others.push_back(id);
  }
  if (disk != nullptr && snapshot->status.ok()) {
    const absl::StatusOr<uint64_t> number = disk->file->Preserve();
    snapshot->status = number.status();
    if (number.ok()) {
      snapshot->number = *number;
      for (const uint32_t id : others) disk->file->Release(id, *number);
    }
  }
  snapshot->disk = std::move(disk);
  std::lock_guard<std::mutex> lock(mutex_);
  snapshot_ = std::move(snapshot);
}

void NvmeState::EndSnapshot() {
  std::vector<View> chunks;  // these go outside the lock
  std::shared_ptr<Disk> disk;
  std::shared_ptr<Snapshot> snapshot;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    snapshot = std::move(snapshot_);
    snapshot_ = nullptr;
    if (snapshot == nullptr) return;
    snapshot->ended = true;
    chunks.swap(snapshot->chunks);
    disk.swap(snapshot->disk);
  }
  if (disk != nullptr) disk->file->ReleaseAll(snapshot->number);
}

// Goes through the chunks in order, and of each through its kinds, one of which is in a buffer of
// the writer's own: a file that does not get on holds nothing of the state.
class NvmeState::SnapshotWriter {
 public:
  SnapshotWriter(NvmeState* state, std::shared_ptr<Snapshot> snapshot,
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
    std::vector<Described> chunks;
    {
      std::lock_guard<std::mutex> lock(state_.mutex_);
      for (const View& view : snapshot_->chunks) chunks.push_back(view.chunk);
    }
    int64_t largest = 0;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const Described& chunk = chunks[i];
      largest = std::max(largest, chunk.size());
      for (int k = 0; k < kStateKinds; ++k) {
        const auto kind = static_cast<StateKind>(k);
        if (!chunk.Has(kind)) continue;
        sections_.push_back({i, kind, chunk.about->chunk, false});
        for (const TensorPart& part : chunk.about->tensors) {
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
        values_, TakeWriterBuffer(static_cast<size_t>(largest) * sizeof(float), state_.writing(),
                                  stop_, WriterPatience(state_.options_.spec)));
    return absl::OkStatus();
  }

  absl::StatusOr<const float*> Values(size_t piece) {
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
    absl::Status status;
    View view;
    {
      std::lock_guard<std::mutex> lock(state_.mutex_);
      if ((stop_ != nullptr && *stop_) || snapshot_->ended)
        return absl::CancelledError("the snapshot was given up");
      view = snapshot_->chunks[section.chunk];
      ++state_.reading_;
    }
    const uint64_t version =
        section.where.trained ? nvme::ChunkFile::Preserved(snapshot_->number) : view.version;
    status = Caught([&] { return state_.ReadKind(view, section.kind, version, 0, values); });
    // Of one that was given up meanwhile, nothing that the next keeps: that has another number.
    if (status.ok() && section.last)
      view.disk->file->Release(view.chunk.about->id, snapshot_->number);
    view = View();
    std::lock_guard<std::mutex> lock(state_.mutex_);
    --state_.reading_;
    state_.changed_.notify_all();
    return snapshot_->ended ? absl::CancelledError("the snapshot was given up") : status;
  }

  NvmeState& state_;
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

v1::SnapshotReport NvmeState::WriteSnapshot(FileSystem* files,
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
