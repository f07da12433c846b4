// NvmeState: how chunks get their first values.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/kernels/convert.h"
#include "common/status_macros.h"
#include "shard_store/nvme/wait_group.h"
#include "shard_store/state/chunk_batch.h"
#include "shard_store/state/nvme_disk.h"

namespace zeroshard::store {
namespace {

constexpr absl::Duration kBufferWait = absl::Seconds(60);
constexpr StateKind kKinds[] = {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq};

// Equal parts of one buffer, for as many threads. Thread-safe.
class Rooms {
 public:
  Rooms(float* begin, int64_t each, int64_t all) {
    for (int64_t at = 0; at + each <= all; at += each) free_.push_back(begin + at);
  }
  // Null: `stop` has become true.
  float* Take(const std::atomic<bool>* stop) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (free_.empty()) {
      if (stop != nullptr && *stop) return nullptr;
      given_.wait_for(lock, std::chrono::milliseconds(50));
    }
    float* const room = free_.back();
    free_.pop_back();
    return room;
  }
  void Give(float* room) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(room);
    given_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable given_;
  std::vector<float*> free_;
};

}  // namespace

absl::Status NvmeState::FillBlock(const Sources& sources, const View& view, StateKind kind,
                                  int64_t begin, int64_t end, float* out) const {
  std::memset(out, 0, static_cast<size_t>(end - begin) * sizeof(float));
  const ParameterSource* source = kind == StateKind::kMaster   ? sources.master
                                  : kind == StateKind::kExpAvg ? sources.exp_avg
                                                               : sources.exp_avg_sq;
  if (source == nullptr) return absl::OkStatus();
  for (const TensorPart& part : view.chunk.about->tensors) {
    if (kind != StateKind::kMaster && !part.tensor->trainable) continue;
    const int64_t first = std::max(begin, part.begin), last = std::min(end, part.end);
    if (first >= last) continue;
    const int64_t from = part.in_tensor + (first - part.begin);
    ZS_RETURN_IF_ERROR(
        source->Read(*part.tensor, from, from + (last - first), out + first - begin));
  }
  return absl::OkStatus();
}

absl::Status NvmeState::FillChunk(const Sources& sources, const std::atomic<bool>* stop,
                                  const View& view, float* room) {
  const uint32_t id = view.chunk.about->id;
  const int64_t size = view.chunk.size();
  nvme::WaitGroup group;
  const auto write = [&](nvme::Section section, int block, nvme::IoBuffer buffer) {
    nvme::AsyncIo::Done done = group.Add();
    absl::Status status =
        view.disk->file->Write({id, section, block}, view.version, std::move(buffer), done);
    if (!status.ok()) done(status, nvme::IoBuffer());
    return status;
  };
  const auto fill = [&]() -> absl::Status {
    for (const StateKind kind : kKinds) {
      if (!view.chunk.Has(kind)) continue;
      const bool rounds = kind == StateKind::kMaster && view.chunk.bytes.parameters != 0;
      for (int64_t at = 0; at < size; at += nvme::kBlockElements) {
        if (stop != nullptr && *stop) return absl::CancelledError("stopped while loading");
        const int block = static_cast<int>(at / nvme::kBlockElements);
        const int64_t end = std::min(at + nvme::kBlockElements, size);
        // Before a buffer is taken: what waits for one waits for the disk alone, and a slow source
        // is not taken for a slow disk.
        ZS_RETURN_IF_ERROR(FillBlock(sources, view, kind, at, end, room));
        if (rounds) {
          ZS_ASSIGN_OR_RETURN(nvme::IoBuffer narrow, others_->Take(kBufferWait));
          const Rounding rounding =
              view.chunk.Rounded() ? Rounding() : view.chunk.about->rounding.From(at);
          cpu::RoundParameters(room, end - at, rounding, narrow.data(), type_, 1);
          ZS_RETURN_IF_ERROR(write(nvme::kParameters, block, std::move(narrow)));
        }
        if (view.chunk.BytesOf(kind) != 0) {
          ZS_ASSIGN_OR_RETURN(nvme::IoBuffer wide, others_->Take(kBufferWait));
          std::memcpy(wide.data(), room, static_cast<size_t>(end - at) * sizeof(float));
          ZS_RETURN_IF_ERROR(write(SectionOf(kind), block, std::move(wide)));
        }
      }
    }
    return absl::OkStatus();
  };
  const absl::Status status = fill();
  const absl::Status written = group.Wait();
  return status.ok() ? written : status;
}

absl::Status NvmeState::Fill(const Sources& sources, absl::Span<const uint32_t> chunks,
                             const std::function<void(uint32_t)>& on_chunk,
                             const std::atomic<bool>* stop) {
  std::vector<std::shared_ptr<MemoryChunk>> wanted;
  for (const uint32_t id : chunks) {
    ZS_ASSIGN_OR_RETURN(const View view, Find(id));
    wanted.push_back(std::make_shared<MemoryChunk>(*view.chunk.about));
  }
  // Values on their way lie in the section that Change uses: a block of it for each of the threads
  // that fill at a time.
  std::lock_guard<std::mutex> lock(moving_mutex_);
  Rooms rooms(moving_->as<float>(), std::min(options_.nvme.chunk_elements, nvme::kBlockElements),
              options_.nvme.chunk_elements);
  return ForEachChunk(
      options_.pool, wanted,
      [&](MemoryChunk* chunk) {
        ZS_ASSIGN_OR_RETURN(const View view, Find(chunk->id));
        float* const room = rooms.Take(stop);
        if (room == nullptr) return absl::CancelledError("stopped while loading");
        const absl::Status status = Caught([&] { return FillChunk(sources, stop, view, room); });
        rooms.Give(room);
        ZS_RETURN_IF_ERROR(status);
        sources.master->DropPages();
        if (on_chunk) on_chunk(chunk->id);
        return absl::OkStatus();
      },
      stop);
}

// Elements [begin, begin + values.size()) of a block; what is around them stays, zeros where
// nothing was.
absl::Status NvmeState::SetBlock(const View& view, StateKind kind, int block, int64_t begin,
                                 absl::Span<const float> values) {
  const uint32_t id = view.chunk.about->id;
  const bool rounded = kind == StateKind::kMaster && view.chunk.Rounded();
  const nvme::Section section = rounded ? nvme::kParameters : SectionOf(kind);
  const uint64_t width = rounded ? SizeOf(type_) : sizeof(float);
  const int64_t first = block * nvme::kBlockElements;
  const int64_t all = std::min(nvme::kBlockElements, view.chunk.size() - first);
  ZS_ASSIGN_OR_RETURN(nvme::IoBuffer buffer, others_->Take(kBufferWait));
  if (static_cast<int64_t>(values.size()) != all) {
    const absl::Span<char> whole(buffer.data(), static_cast<size_t>(all) * width);
    const absl::Status read = view.disk->file->ReadRange(
        id, section, view.version, static_cast<uint64_t>(first) * width, whole, others_.get());
    if (absl::IsFailedPrecondition(read)) {
      std::memset(whole.data(), 0, whole.size());
    } else if (!read.ok()) {
      return read;
    }
  }
  char* const to = buffer.data() + static_cast<uint64_t>(begin - first) * width;
  if (rounded) {
    cpu::Convert(values.data(), DType::kF32, static_cast<int64_t>(values.size()), to, type_, 1);
  } else {
    std::memcpy(to, values.data(), values.size() * sizeof(float));
  }
  nvme::WaitGroup group;
  nvme::AsyncIo::Done done = group.Add();
  const absl::Status status =
      view.disk->file->Write({id, section, block}, view.version, std::move(buffer), done);
  if (!status.ok()) done(status, nvme::IoBuffer());
  return group.Wait();
}

absl::Status NvmeState::SetState(uint32_t id, StateKind kind, int64_t begin,
                                 absl::Span<const float> values) {
  ZS_ASSIGN_OR_RETURN(const View view,
                      FindKind(id, kind, begin, static_cast<int64_t>(values.size())));
  std::lock_guard<std::mutex> lock(set_mutex_);
  while (!values.empty()) {
    const int block = static_cast<int>(begin / nvme::kBlockElements);
    const auto count = static_cast<size_t>(std::min<int64_t>(
        static_cast<int64_t>(values.size()), (block + 1) * nvme::kBlockElements - begin));
    ZS_RETURN_IF_ERROR(Note(SetBlock(view, kind, block, begin, values.subspan(0, count))));
    values.remove_prefix(count);
    begin += static_cast<int64_t>(count);
  }
  return absl::OkStatus();
}

absl::Status NvmeState::FinishChunk(uint32_t id) {
  ZS_ASSIGN_OR_RETURN(const View view, Find(id));
  if (view.chunk.bytes.parameters == 0 || view.chunk.Rounded()) return absl::OkStatus();
  std::lock_guard<std::mutex> lock(moving_mutex_);
  for (int64_t at = 0; at < view.chunk.size(); at += nvme::kBlockElements) {
    const auto values =
        absl::MakeSpan(moving_->as<float>(),
                       static_cast<size_t>(std::min(nvme::kBlockElements, view.chunk.size() - at)));
    ZS_RETURN_IF_ERROR(ReadKind(view, StateKind::kMaster, view.version, at, values));
    ZS_ASSIGN_OR_RETURN(nvme::IoBuffer buffer, others_->Take(kBufferWait));
    cpu::RoundParameters(values.data(), static_cast<int64_t>(values.size()),
                         view.chunk.about->rounding.From(at), buffer.data(), type_, 1);
    nvme::WaitGroup group;
    nvme::AsyncIo::Done done = group.Add();
    const absl::Status status =
        view.disk->file->Write({id, nvme::kParameters, static_cast<int>(at / nvme::kBlockElements)},
                               view.version, std::move(buffer), done);
    if (!status.ok()) done(status, nvme::IoBuffer());
    ZS_RETURN_IF_ERROR(Note(group.Wait()));
  }
  return absl::OkStatus();
}

}  // namespace zeroshard::store
