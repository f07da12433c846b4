// The memory that samples are read into for one micro-batch. Not thread-safe.
#pragma once

#include <functional>
#include <vector>

#include "worker/data/dataset.h"
#include "worker/model/unit.h"

namespace zeroshard {

class BatchBuffers {
 public:
  BatchBuffers(int64_t micro_batch, int64_t sequence);

  // Reads sample index(i) of `data` into row i; below 0: a row of tokens 0 without a loss. The
  // fields that dropout needs are left to the caller.
  MicroBatch Load(const TokenDataset& data, const std::function<int64_t(int64_t i)>& index);
  // What was loaded last (zeros at first), as it was returned then.
  const MicroBatch& last() const { return last_; }

 private:
  const size_t sequence_;
  std::vector<int32_t> tokens_, targets_, starts_;
  MicroBatch last_;
};

}  // namespace zeroshard
