// NvmeState: one step over the chunks.
#include <algorithm>
#include <utility>
#include <vector>

#include "common/kernels/convert.h"
#include "shard_store/nvme/update_pipeline.h"
#include "shard_store/state/nvme_disk.h"

namespace zeroshard::store {

struct NvmeState::Update {
  std::unique_ptr<const OptimizerStep> step;  // null: the version moves, the state does not
  std::function<void(uint32_t, uint32_t)> on_chunk;
  std::function<void(const absl::Status&)> done;
  std::shared_ptr<Disk> disk;
  uint64_t to = 0;

  void Tell(uint32_t chunk, bool digests) const {
    uint32_t digest = 0;
    if (digests) {
      const auto crc = disk->file->SectionCrc(chunk, nvme::kMaster, to);
      if (crc.ok()) digest = *crc;
    }
    on_chunk(chunk, digest);
  }
};

void NvmeState::Apply(const v1::StepDecision& decision,
                      std::function<void(uint32_t chunk, uint32_t digest)> on_chunk,
                      std::function<void(const absl::Status&)> done) {
  auto update = std::make_shared<Update>();
  if (!decision.skip()) update->step = MakeOptimizerStep(options_.spec, decision);
  update->on_chunk = std::move(on_chunk);
  update->done = std::move(done);
  std::vector<uint32_t> trained;
  uint64_t from = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++applies_;
    from = version_;
    update->to = version_ + 1;
    update->disk = disk_;
    for (const auto& [id, chunk] : chunks_)
      if (chunk.trained()) trained.push_back(id);
  }
  TaskPool* const pool = options_.pool;
  const auto end = [this, update, pool](absl::Status status) {
    pool->Add([this, update, status = std::move(status)] { OnUpdated(update, status); });
  };
  if (update->disk == nullptr) return end(absl::OkStatus());
  nvme::Staging& staging = *update->disk->staging;
  if (update->step == nullptr) {
    if (absl::Status status = staging.Drop(); !status.ok()) return end(std::move(status));
    update->disk->file->AdvanceVersion(from, update->to);
    pool->Add([this, update, trained = std::move(trained)] {
      for (const uint32_t id : trained) update->Tell(id, options_.digests);
      OnUpdated(update, absl::OkStatus());
    });
    return;
  }
  if (trained.empty()) return end(absl::OkStatus());
  if (absl::Status status = staging.Flush(); !status.ok()) return end(std::move(status));
  nvme::UpdateOptions options;
  options.file = update->disk->file;
  options.pool = updates_;
  options.chunks = std::move(trained);
  options.from_version = from;
  options.to_version = update->to;
  options.compute = [this, update](const nvme::UpdateRow& row) {
    return ComputeRow(*update, row.chunk, row.begin, row.end, row.gradient, row.master, row.exp_avg,
                      row.exp_avg_sq, row.parameters);
  };
  options.execute = [pool](std::function<void()> task) { pool->Add(std::move(task)); };
  options.on_chunk = [this, update](uint32_t chunk) { update->Tell(chunk, options_.digests); };
  options.done = [this, update](const absl::Status& status) { OnUpdated(update, status); };
  if (absl::Status status = nvme::StartUpdate(std::move(options)); !status.ok())
    end(std::move(status));
}

absl::Status NvmeState::ComputeRow(const Update& update, uint32_t id, int64_t begin, int64_t end,
                                   const void* gradient, float* master, float* exp_avg,
                                   float* exp_avg_sq, void* parameters) const {
  std::shared_ptr<const MemoryChunk> chunk;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = chunks_.find(id);
    if (found == chunks_.end()) return absl::InternalError("an update of a chunk that is gone");
    chunk = found->second.about;
  }
  const auto trained = [&](const TensorPart& part) {
    return part.tensor->trainable && part.begin < end && part.end > begin;
  };
  int64_t covered = 0;
  for (const TensorPart& part : chunk->tensors)
    if (trained(part)) covered += std::min(end, part.end) - std::max(begin, part.begin);
  // The row's parameters were not read: those of frozen tensors and the padding are made again.
  if (parameters != nullptr && covered != end - begin)
    cpu::RoundParameters(master, end - begin, chunk->rounding.From(begin), parameters, type_, 1);
  const auto width = static_cast<int64_t>(SizeOf(type_));
  for (const TensorPart& part : chunk->tensors) {
    if (!trained(part)) continue;
    const int64_t first = std::max(begin, part.begin);
    const int64_t at = first - begin;
    UpdateRange range;
    range.size = std::min(end, part.end) - first;
    range.unit = chunk->chunk.unit;
    range.first = chunk->chunk.begin + first;
    range.decay = part.tensor->decay;
    range.gradient = static_cast<const char*>(gradient) + at * width;
    range.gradient_type = type_;
    range.master = master + at;
    range.exp_avg = exp_avg + at;
    range.exp_avg_sq = exp_avg_sq == nullptr ? nullptr : exp_avg_sq + at;
    range.parameters = parameters == nullptr ? static_cast<void*>(range.master)
                                             : static_cast<char*>(parameters) + at * width;
    range.parameter_type = type_;
    update.step->Update(range);
  }
  return absl::OkStatus();
}

void NvmeState::OnUpdated(const std::shared_ptr<Update>& update, absl::Status status) {
  std::shared_ptr<Disk> disk = std::move(update->disk);
  update->disk = nullptr;
  // Everything was flushed before: this does not wait.
  if (status.ok() && disk != nullptr && update->step != nullptr) status = disk->staging->Drop();
  disk = nullptr;  // once applies_ is less, nothing here holds the file
  status = Note(std::move(status));
  if (status.ok()) {
    std::lock_guard<std::mutex> lock(mutex_);
    version_ = update->to;
  }
  update->done(status);
  std::lock_guard<std::mutex> lock(mutex_);
  --applies_;
  changed_.notify_all();
}

}  // namespace zeroshard::store
