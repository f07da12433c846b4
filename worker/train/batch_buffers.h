// The memory that samples are read into for one micro-batch, here and on the device. Not
// thread-safe.
#pragma once

#include <array>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "worker/data/dataset.h"
#include "worker/device/device.h"
#include "worker/model/unit.h"

namespace zeroshard {

// A micro-batch on the device, and how many of its targets carry a loss.
struct LoadedBatch {
  MicroBatch mb;
  int64_t tokens = 0;
};

class BatchBuffers {
 public:
  // RESOURCE_EXHAUSTED names the bytes. `device` outlives the buffers.
  static absl::StatusOr<std::unique_ptr<BatchBuffers>> Create(int64_t micro_batch, int64_t sequence,
                                                              Device* device);
  // Waits for what is on its way.
  ~BatchBuffers();

  // Reads sample index(i) of `data` into row i; below 0: a row of tokens 0 without a loss. The
  // fields that dropout needs are left to the caller. What is computed next sees it. The device's
  // error, of an earlier load too.
  absl::StatusOr<LoadedBatch> Load(const TokenDataset& data,
                                   const std::function<int64_t(int64_t i)>& index);
  // What was loaded last (zeros at first), as it was returned then.
  const MicroBatch& last() const { return last_; }

 private:
  BatchBuffers(int64_t micro_batch, int64_t sequence, Device* device);

  // What one load reads into: the one before may still be on its way.
  struct Staging {
    Buffer memory;
    Event copied;
  };
  const size_t sequence_;
  const size_t tokens_;  // of a micro-batch
  Device* const device_;
  Buffer memory_;  // tokens, targets and document starts
  std::array<Staging, 2> staging_;
  size_t next_ = 0;
  MicroBatch last_;
};

}  // namespace zeroshard
