// What the parts of NvmeState share. Within this library.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "common/checkpoint/manifest.h"
#include "shard_store/nvme/chunk_file.h"
#include "shard_store/nvme/staging.h"
#include "shard_store/state/memory_budget.h"
#include "shard_store/state/nvme_state.h"

namespace zeroshard::store {

struct NvmeState::Disk {
  Disk() = default;
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;
  ~Disk() {
    staging = nullptr;
    file = nullptr;
    if (budget != nullptr) budget->Give(taken);
  }

  MemoryBudget* budget = nullptr;  // gets back what was taken
  uint64_t taken = 0;
  std::shared_ptr<nvme::ChunkFile> file;
  std::unique_ptr<nvme::Staging> staging;
};

inline nvme::Section SectionOf(StateKind kind) {
  return kind == StateKind::kMaster   ? nvme::kMaster
         : kind == StateKind::kExpAvg ? nvme::kExpAvg
                                      : nvme::kExpAvgSq;
}

}  // namespace zeroshard::store
