// Where the versions of a chunk lie: at home, or in a spare slot while a snapshot needs what is at
// home.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "shard_store/nvme/chunk_file.h"
#include "shard_store/nvme/crc_combine.h"

namespace zeroshard::nvme {

absl::StatusOr<bool> ChunkFile::BeginUpdate(uint32_t number, std::function<void()> retry) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = chunks_.find(number);
  if (found == chunks_.end() || found->second.entry->element_bytes[kStaging] == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        file_->path(), ": chunk ", number, found == chunks_.end() ? " is not here" : " is frozen",
        "; there is nothing to update"));
  }
  Chunk& chunk = found->second;
  if (chunk.updating_spare.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat(file_->path(), ": chunk ", number, " is being updated already"));
  }
  if (!chunk.home.preserved) {
    chunk.updating_spare = false;
    return true;
  }
  // What is at home must stay. There is a spare slot already where an update came between.
  if (chunk.spare_slot < 0) {
    if (free_slots_.empty()) {
      if (retry) waiting_.push_back(std::move(retry));
      return false;
    }
    chunk.spare_slot = free_slots_.back();
    free_slots_.pop_back();
    chunk.spare.place = layout_.Spare(chunk.spare_slot);
    for (int i = 0; i <= kExpAvgSq; ++i) {
      chunk.spare.records[i].assign(chunk.home.records[i].size(), Record());
    }
  }
  chunk.updating_spare = true;
  return true;
}

void ChunkFile::FreeSpare(Chunk* chunk) {
  free_slots_.push_back(chunk->spare_slot);
  chunk->spare_slot = -1;
  chunk->spare = Copy();
}

void ChunkFile::FinishUpdate(uint32_t number) {
  std::vector<std::function<void()>> wake;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = chunks_.find(number);
    if (found == chunks_.end() || !found->second.updating_spare.has_value()) return;
    Chunk& chunk = found->second;
    chunk.current_is_spare = *std::exchange(chunk.updating_spare, std::nullopt);
    if (chunk.spare_slot >= 0 && !chunk.current_is_spare && !chunk.spare.preserved) {
      FreeSpare(&chunk);
      wake.swap(waiting_);
    }
  }
  for (const auto& call : wake) call();
}

absl::StatusOr<uint64_t> ChunkFile::Preserve() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (preserving_) {
    return absl::FailedPreconditionError(
        absl::StrCat(file_->path(), ": a snapshot is being written; end it before the next"));
  }
  for (const auto& [number, chunk] : chunks_) {
    if (!chunk.updating_spare.has_value()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        file_->path(), ": chunk ", number, " is being updated; a snapshot begins between updates"));
  }
  preserving_ = true;
  for (auto& [number, chunk] : chunks_) chunk.current().preserved = true;
  return ++preserved_;
}

void ChunkFile::Release(Chunk* chunk) {
  chunk->home.preserved = chunk->spare.preserved = false;
  // While an update reads the old version there, FinishUpdate frees it.
  if (chunk->spare_slot >= 0 && !chunk->current_is_spare && !chunk->updating_spare.has_value()) {
    FreeSpare(chunk);
  }
}

void ChunkFile::Release(uint32_t number, uint64_t snapshot) {
  std::vector<std::function<void()>> wake;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = chunks_.find(number);
    if (found == chunks_.end() || !preserving_ || snapshot != preserved_) return;
    Release(&found->second);
    wake.swap(waiting_);
  }
  for (const auto& call : wake) call();
}

void ChunkFile::ReleaseAll(uint64_t snapshot) {
  std::vector<std::function<void()>> wake;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!preserving_ || snapshot != preserved_) return;
    for (auto& [number, chunk] : chunks_) Release(&chunk);
    preserving_ = false;
    wake.swap(waiting_);
  }
  for (const auto& call : wake) call();
}

void ChunkFile::AdvanceVersion(uint64_t from, uint64_t to) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [number, chunk] : chunks_) {
    for (Copy* copy : {&chunk.home, &chunk.spare}) {
      for (int section = kMaster; section <= kParameters; ++section) {
        for (Record& record : copy->records[section]) {
          // Not an old copy that a snapshot still reads, beside a newer one of the same chunk.
          const bool current = section == kParameters || copy == &chunk.current();
          if (current && record.version == from) record.version = to;
        }
      }
    }
  }
}

void ChunkFile::DropStaging() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [number, chunk] : chunks_) {
    for (Record& record : chunk.home.records[kStaging]) {
      record.valid = false;
      record.dropped = record.writing;
    }
  }
}

int ChunkFile::free_spare_slots() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(free_slots_.size());
}

absl::StatusOr<uint32_t> ChunkFile::SectionCrc(uint32_t number, Section section,
                                               uint64_t version) const {
  auto id = CheckId({number, section, 0});
  if (!id.ok()) return id.status();
  const ChunkLayout::Entry* entry = *id;
  std::lock_guard<std::mutex> lock(mutex_);
  uint32_t crc = 0;
  for (int block = 0; block < entry->blocks(); ++block) {
    const auto found = const_cast<ChunkFile*>(this)->FindToRead({number, section, block}, version);
    if (!found.ok()) return found.status();
    crc = CombineCrc32c(crc, found->record->crc, entry->PayloadBytes(section, block));
  }
  return crc;
}

}  // namespace zeroshard::nvme
