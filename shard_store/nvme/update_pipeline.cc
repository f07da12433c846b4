#include "shard_store/nvme/update_pipeline.h"

#include <array>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace zeroshard::nvme {
namespace {

constexpr std::array<Section, 4> kRead = {kStaging, kMaster, kExpAvg, kExpAvgSq};
constexpr std::array<Section, 4> kWritten = {kMaster, kExpAvg, kExpAvgSq, kParameters};

class Update : public std::enable_shared_from_this<Update> {
 public:
  explicit Update(UpdateOptions options) : options_(std::move(options)) {}

  // Starts as many rows as there are buffers for. Safe to call from anywhere, at any time: calls
  // that come while one is at work are seen to by that one.
  void Pump();

 private:
  struct Row {
    uint32_t chunk = 0;
    int block = 0;
    std::array<IoBuffer, kSections> buffers;  // by section
    int pending = 0;                          // operations, under the lock
  };

  bool StartNext();  // false: nothing to start now
  void Begin(const std::shared_ptr<Row>& row);
  void OnRead(const std::shared_ptr<Row>& row, Section section, const absl::Status& status,
              IoBuffer buffer);
  void Compute(const std::shared_ptr<Row>& row);
  absl::Status ComputeChecked(Row* row);
  // One of what a row waits for.
  void OnWritten(const std::shared_ptr<Row>& row, const absl::Status& status, IoBuffer buffer);
  void EndRow(const std::shared_ptr<Row>& row);
  void Fail(const absl::Status& status);
  void EndIfIdle();
  BlockId Id(const Row& row, Section section) const { return {row.chunk, section, row.block}; }
  bool Keeps(uint32_t chunk, Section section) const {
    return options_.file->layout().Find(chunk)->element_bytes[section] != 0;
  }

  UpdateOptions options_;  // unchanged until the end
  std::mutex mutex_;
  bool pumping_ = false, pump_again_ = false;
  size_t next_chunk_ = 0;
  int next_block_ = 0;
  bool chunk_open_ = false;     // BeginUpdate of next_chunk_ has said yes
  std::vector<int> rows_left_;  // by chunk, in order
  std::map<uint32_t, size_t> order_;
  int rows_at_work_ = 0;
  bool ended_ = false;
  absl::Status error_;

  friend absl::Status zeroshard::nvme::StartUpdate(UpdateOptions options);
};

void Update::Pump() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    pump_again_ = true;
    if (std::exchange(pumping_, true)) return;
  }
  while (true) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!std::exchange(pump_again_, false)) {
        pumping_ = false;
        break;
      }
    }
    while (StartNext()) {
    }
  }
  EndIfIdle();
}

// Only the thread that pumps is here, so the next row needs no lock; the errors do.
bool Update::StartNext() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_.ok() || next_chunk_ == options_.chunks.size()) return false;
  }
  const uint32_t chunk = options_.chunks[next_chunk_];
  if (!chunk_open_) {
    const auto open =
        options_.file->BeginUpdate(chunk, [update = shared_from_this()] { update->Pump(); });
    if (!open.ok()) {
      Fail(open.status());
      return false;
    }
    if (!*open) return false;
    chunk_open_ = true;
  }
  auto row = std::make_shared<Row>();
  row->chunk = chunk;
  row->block = next_block_;
  // All of a row's buffers or none: rows that wait for each other's would wait for ever.
  for (int section = 0; section < kSections; ++section) {
    if (!Keeps(chunk, static_cast<Section>(section))) continue;
    row->buffers[section] = options_.pool->TryTake();
    if (!row->buffers[section]) return false;
  }
  if (++next_block_ == options_.file->layout().Find(chunk)->blocks()) {
    next_block_ = 0;
    chunk_open_ = false;
    std::lock_guard<std::mutex> lock(mutex_);
    ++next_chunk_;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++rows_at_work_;
  }
  Begin(row);
  return true;
}

void Update::Begin(const std::shared_ptr<Row>& row) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Section section : kRead) row->pending += Keeps(row->chunk, section) ? 1 : 0;
  }
  for (const Section section : kRead) {
    if (!Keeps(row->chunk, section)) continue;
    const uint64_t version = section == kStaging ? options_.to_version : options_.from_version;
    const absl::Status status = options_.file->Read(
        Id(*row, section), version, std::move(row->buffers[section]),
        [update = shared_from_this(), row, section](absl::Status read, IoBuffer buffer) {
          update->OnRead(row, section, read, std::move(buffer));
        });
    if (!status.ok()) OnRead(row, section, status, IoBuffer());
  }
}

void Update::OnRead(const std::shared_ptr<Row>& row, Section section, const absl::Status& status,
                    IoBuffer buffer) {
  if (!status.ok()) Fail(status);
  bool failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    row->buffers[section] = std::move(buffer);
    if (--row->pending != 0) return;
    failed = !error_.ok();
  }
  if (failed) return EndRow(row);
  options_.execute([update = shared_from_this(), row] { update->Compute(row); });
}

absl::Status Update::ComputeChecked(Row* row) {
  for (const Section section : kRead) {
    if (!Keeps(row->chunk, section)) continue;
    const uint64_t version = section == kStaging ? options_.to_version : options_.from_version;
    absl::Status status = options_.file->Check(Id(*row, section), version, row->buffers[section]);
    if (!status.ok()) return status;
  }
  UpdateRow view;
  view.chunk = row->chunk;
  view.begin = row->block * kBlockElements;
  view.end = view.begin + options_.file->layout().Find(row->chunk)->BlockElements(row->block);
  view.gradient = row->buffers[kStaging].data();
  view.master = reinterpret_cast<float*>(row->buffers[kMaster].data());
  view.exp_avg = reinterpret_cast<float*>(row->buffers[kExpAvg].data());
  view.exp_avg_sq = reinterpret_cast<float*>(row->buffers[kExpAvgSq].data());
  view.parameters = row->buffers[kParameters].data();
  return options_.compute(view);
}

void Update::Compute(const std::shared_ptr<Row>& row) {
  bool failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failed = !error_.ok();
  }
  if (failed) return EndRow(row);
  if (absl::Status status = ComputeChecked(row.get()); !status.ok()) {
    Fail(status);
    return EndRow(row);
  }
  row->buffers[kStaging].Reset();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    row->pending = 1;  // this thread's: the update does not end while it is in here
    for (const Section section : kWritten) row->pending += Keeps(row->chunk, section) ? 1 : 0;
  }
  for (const Section section : kWritten) {
    if (!Keeps(row->chunk, section)) continue;
    const absl::Status status = options_.file->Write(
        Id(*row, section), options_.to_version, std::move(row->buffers[section]),
        [update = shared_from_this(), row](absl::Status written, IoBuffer buffer) {
          update->OnWritten(row, written, std::move(buffer));
        });
    if (!status.ok()) OnWritten(row, status, IoBuffer());
  }
  OnWritten(row, absl::OkStatus(), IoBuffer());
}

void Update::OnWritten(const std::shared_ptr<Row>& row, const absl::Status& status,
                       IoBuffer buffer) {
  if (!status.ok()) Fail(status);
  buffer.Reset();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--row->pending != 0) return;
  }
  bool chunk_done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    chunk_done = --rows_left_[order_.find(row->chunk)->second] == 0 && error_.ok();
  }
  if (chunk_done) {
    options_.file->FinishUpdate(row->chunk);
    if (options_.on_chunk) {
      // The row stays at work until the chunk was told of: `done` is last.
      options_.execute([update = shared_from_this(), row] {
        update->options_.on_chunk(row->chunk);
        update->EndRow(row);
      });
      return Pump();  // its buffers are free already
    }
  }
  EndRow(row);
}

void Update::EndRow(const std::shared_ptr<Row>& row) {
  for (IoBuffer& buffer : row->buffers) buffer.Reset();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --rows_at_work_;
  }
  Pump();
}

void Update::Fail(const absl::Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_.ok()) error_ = status;
}

void Update::EndIfIdle() {
  absl::Status result;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ended_ || rows_at_work_ != 0 || pumping_) return;
    if (error_.ok() && next_chunk_ != options_.chunks.size()) return;  // the snapshot is waited for
    ended_ = true;
    result = error_;
  }
  options_.execute([update = shared_from_this(), result] {
    const auto done = std::move(update->options_.done);
    // Nobody else looks at them any more: who is told finds file and pool its own.
    update->options_.file.reset();
    update->options_.pool.reset();
    done(result);
  });
}

}  // namespace

absl::Status StartUpdate(UpdateOptions options) {
  if (options.file == nullptr || options.pool == nullptr || !options.compute || !options.execute ||
      !options.done) {
    return absl::InvalidArgumentError("an update needs file, pool, compute, execute and done");
  }
  if (options.pool->size() < kLeastRows * kBuffersPerRow) {
    return absl::InvalidArgumentError(
        absl::StrCat("an update with ", options.pool->size(), " buffers; at least ",
                     kLeastRows * kBuffersPerRow, " of ", kBufferBytes, " bytes are wanted"));
  }
  auto update = std::make_shared<Update>(std::move(options));
  const UpdateOptions& wanted = update->options_;
  for (const uint32_t chunk : wanted.chunks) {
    const ChunkLayout::Entry* entry = wanted.file->layout().Find(chunk);
    const bool trained = entry != nullptr && entry->element_bytes[kStaging] != 0 &&
                         entry->element_bytes[kMaster] != 0;
    if (!trained || !update->order_.emplace(chunk, update->rows_left_.size()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(wanted.file->path(), ": chunk ", chunk,
                       entry == nullptr ? " is not here"
                       : trained        ? " is named twice"
                                        : " is frozen",
                       "; an update is of trained chunks, each once"));
    }
    update->rows_left_.push_back(entry->blocks());
  }
  update->Pump();
  return absl::OkStatus();
}

}  // namespace zeroshard::nvme
