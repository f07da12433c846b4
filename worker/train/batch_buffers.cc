#include "worker/train/batch_buffers.h"

#include <algorithm>

namespace zeroshard {

BatchBuffers::BatchBuffers(int64_t micro_batch, int64_t sequence)
    : sequence_(static_cast<size_t>(sequence)),
      tokens_(static_cast<size_t>(micro_batch * sequence)),
      targets_(tokens_.size()),
      starts_(tokens_.size()) {
  last_.batch = micro_batch;
  last_.tokens = tokens_.data();
  last_.targets = targets_.data();
}

MicroBatch BatchBuffers::Load(const TokenDataset& data,
                              const std::function<int64_t(int64_t i)>& index) {
  for (int64_t i = 0; i < last_.batch; ++i) {
    const size_t at = static_cast<size_t>(i) * sequence_;
    const int64_t sample = index(i);
    if (sample < 0) {
      std::fill_n(tokens_.begin() + static_cast<int64_t>(at), sequence_, 0);
      std::fill_n(targets_.begin() + static_cast<int64_t>(at), sequence_, -1);
      std::fill_n(starts_.begin() + static_cast<int64_t>(at), sequence_, 0);
      continue;
    }
    data.Sample(sample, absl::MakeSpan(tokens_).subspan(at, sequence_),
                absl::MakeSpan(targets_).subspan(at, sequence_));
    if (data.masks_documents())
      data.DocumentStarts(sample, absl::MakeSpan(starts_).subspan(at, sequence_));
  }
  last_.document_start = data.masks_documents() ? starts_.data() : nullptr;
  return last_;
}

}  // namespace zeroshard
