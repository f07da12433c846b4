// RoPE's sines and cosines in device memory, kept for each set of frequencies: one a model, or one
// for each kind of its layers.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <vector>

#include "absl/status/statusor.h"
#include "common/status_macros.h"
#include "worker/device/device.h"
#include "worker/ops/cuda/vector_ops.h"

namespace zeroshard::cuda {

// Not thread-safe.
class RopeCache {
 public:
  struct Tables {
    const float* cosines;
    const float* sines;
  };

  explicit RopeCache(Device* device) : device_(device) {}

  // Tables of at least `positions` positions for frequencies [half] in host memory; made on
  // `stream`, the device's compute stream, where there are none. The host waits for the
  // frequencies' copy. The errors of the device.
  absl::StatusOr<Tables> Get(cudaStream_t stream, const float* frequencies, int64_t half,
                             int64_t positions) {
    Entry* entry = Find(frequencies, half);
    if (entry->positions < positions) {
      ZS_RETURN_IF_ERROR(Fill(stream, std::max(positions, 2 * entry->positions), entry));
    }
    return Tables{entry->cosines.as<float>(), entry->sines.as<float>()};
  }

 private:
  static constexpr size_t kMostEntries = 16;
  struct Entry {
    std::vector<float> key;
    int64_t positions = 0;
    Buffer frequencies, cosines, sines;
  };

  // The most recently used comes first; one too many drops the last.
  Entry* Find(const float* frequencies, int64_t half) {
    const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
      return std::equal(entry.key.begin(), entry.key.end(), frequencies, frequencies + half);
    });
    if (found != entries_.end()) {
      entries_.splice(entries_.begin(), entries_, found);
    } else {
      if (entries_.size() == kMostEntries) entries_.pop_back();
      entries_.emplace_front().key.assign(frequencies, frequencies + half);
    }
    return &entries_.front();
  }

  absl::Status Fill(cudaStream_t stream, int64_t positions, Entry* entry) {
    const auto half = static_cast<int64_t>(entry->key.size());
    const size_t bytes = entry->key.size() * sizeof(float);
    if (entry->frequencies.bytes() == 0) {
      ZS_ASSIGN_OR_RETURN(entry->frequencies, device_->Allocate(bytes, MemoryKind::kBuffers));
      ZS_RETURN_IF_ERROR(CopyAndWait(device_, entry->frequencies.data(), entry->key.data(), bytes));
    }
    entry->positions = 0;
    entry->cosines = Buffer();
    entry->sines = Buffer();
    const size_t table = static_cast<size_t>(positions) * bytes;
    ZS_ASSIGN_OR_RETURN(entry->cosines, device_->Allocate(table, MemoryKind::kBuffers));
    ZS_ASSIGN_OR_RETURN(entry->sines, device_->Allocate(table, MemoryKind::kBuffers));
    ZS_RETURN_IF_ERROR(RopeTables(stream, entry->frequencies.as<float>(), half, positions,
                                  entry->cosines.as<float>(), entry->sines.as<float>()));
    entry->positions = positions;
    return absl::OkStatus();
  }

  Device* const device_;
  std::list<Entry> entries_;
};

}  // namespace zeroshard::cuda
