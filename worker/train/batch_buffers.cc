#include "worker/train/batch_buffers.h"

#include <algorithm>

#include "common/status_macros.h"

namespace zeroshard {

BatchBuffers::BatchBuffers(int64_t micro_batch, int64_t sequence, Device* device)
    : sequence_(static_cast<size_t>(sequence)),
      tokens_(static_cast<size_t>(micro_batch * sequence)),
      device_(device) {
  last_.batch = micro_batch;
}

BatchBuffers::~BatchBuffers() {
  for (const Staging& staging : staging_) staging.copied.Wait().IgnoreError();
}

absl::StatusOr<std::unique_ptr<BatchBuffers>> BatchBuffers::Create(int64_t micro_batch,
                                                                   int64_t sequence,
                                                                   Device* device) {
  std::unique_ptr<BatchBuffers> buffers(new BatchBuffers(micro_batch, sequence, device));
  const size_t bytes = 3 * buffers->tokens_ * sizeof(int32_t);
  ZS_ASSIGN_OR_RETURN(buffers->memory_, device->Allocate(bytes, MemoryKind::kBuffers));
  for (Staging& staging : buffers->staging_) {
    ZS_ASSIGN_OR_RETURN(staging.memory, device->AllocateHost(bytes));
  }
  buffers->last_.tokens = buffers->memory_.as<int32_t>();
  buffers->last_.targets = buffers->last_.tokens + buffers->tokens_;
  return buffers;
}

absl::StatusOr<LoadedBatch> BatchBuffers::Load(const TokenDataset& data,
                                               const std::function<int64_t(int64_t i)>& index) {
  Staging& staging = staging_[next_];
  next_ = (next_ + 1) % staging_.size();
  ZS_RETURN_IF_ERROR(staging.copied.Wait());
  const absl::Span<int32_t> tokens(staging.memory.as<int32_t>(), tokens_);
  const absl::Span<int32_t> targets(tokens.data() + tokens_, tokens_);
  const absl::Span<int32_t> starts(targets.data() + tokens_, tokens_);
  for (int64_t i = 0; i < last_.batch; ++i) {
    const size_t at = static_cast<size_t>(i) * sequence_;
    const int64_t sample = index(i);
    if (sample < 0) {
      std::fill_n(tokens.begin() + at, sequence_, 0);
      std::fill_n(targets.begin() + at, sequence_, -1);
      std::fill_n(starts.begin() + at, sequence_, 0);
      continue;
    }
    data.Sample(sample, tokens.subspan(at, sequence_), targets.subspan(at, sequence_));
    if (data.masks_documents()) data.DocumentStarts(sample, starts.subspan(at, sequence_));
  }
  const size_t arrays = data.masks_documents() ? 3 : 2;
  staging.copied =
      device_->compute()->Copy(memory_.data(), tokens.data(), arrays * tokens_ * sizeof(int32_t));
  last_.document_start = data.masks_documents() ? last_.targets + tokens_ : nullptr;
  return LoadedBatch{
      .mb = last_,
      .tokens = std::count_if(targets.begin(), targets.end(), [](int32_t t) { return t >= 0; })};
}

}  // namespace zeroshard
