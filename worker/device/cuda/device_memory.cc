#include <cstdint>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/device/cuda/memory.h"

namespace zeroshard::cuda {

absl::StatusOr<std::shared_ptr<DeviceMemory>> DeviceMemory::Create(
    std::shared_ptr<Context> context, std::shared_ptr<CudaStream> compute) {
  ZS_ASSIGN_OR_RETURN(StreamHandle stream, compute->handle());
  ZS_RETURN_IF_ERROR(context->Enter());
  Runtime* const runtime = context->runtime();
  PoolHandle pool = nullptr;
  ZS_RETURN_IF_ERROR(ZS_CUDA_STATUS(context, runtime->CreatePool(context->ordinal(), &pool)));
  return std::shared_ptr<DeviceMemory>(
      new DeviceMemory(std::move(context), std::move(compute), stream, pool));
}

DeviceMemory::DeviceMemory(std::shared_ptr<Context> context, std::shared_ptr<CudaStream> compute,
                           StreamHandle stream, PoolHandle pool)
    : context_(std::move(context)), compute_(std::move(compute)), stream_(stream), pool_(pool) {}

DeviceMemory::~DeviceMemory() {
  if (!context_->Enter().ok()) return;
  Runtime* const runtime = context_->runtime();
  ZS_CUDA_STATUS(context_, runtime->SynchronizeStream(stream_)).IgnoreError();
  runtime->DestroyPool(pool_);
}

absl::StatusOr<Buffer> DeviceMemory::Allocate(size_t bytes, MemoryKind kind) {
  if (bytes == 0) return Buffer();
  ZS_RETURN_IF_ERROR(context_->Enter());
  if (bytes > static_cast<size_t>(std::numeric_limits<int64_t>::max())) {
    return Exhausted(bytes, kind);
  }
  ZS_ASSIGN_OR_RETURN(void* data, Take(bytes, kind));
  if (absl::Status status = Zero(data, bytes); !status.ok()) {
    Free(data);
    return status;
  }
  const auto counted = static_cast<int64_t>(bytes);
  accounting_.Add(kind, counted);
  return Buffer(data, bytes, [self = shared_from_this(), data, counted, kind] {
    self->Free(data);
    self->accounting_.Remove(kind, counted);
  });
}

absl::StatusOr<void*> DeviceMemory::Take(size_t bytes, MemoryKind kind) {
  Runtime* const runtime = context_->runtime();
  void* data = nullptr;
  Error error = runtime->AllocateAsync(&data, bytes, pool_, stream_);
  if (error == Error::kOutOfMemory) {
    // The pool may hold enough, in pieces that are too small or not free yet.
    ZS_RETURN_IF_ERROR(ZS_CUDA_STATUS(context_, runtime->SynchronizeStream(stream_)));
    ZS_RETURN_IF_ERROR(ZS_CUDA_STATUS(context_, runtime->TrimPool(pool_, 0)));
    error = runtime->AllocateAsync(&data, bytes, pool_, stream_);
  }
  if (error == Error::kOutOfMemory) return Exhausted(bytes, kind);
  ZS_RETURN_IF_ERROR(context_->Check(error, "AllocateAsync", __FILE__, __LINE__));
  return data;
}

absl::Status DeviceMemory::Zero(void* data, size_t bytes) {
  Runtime* const runtime = context_->runtime();
  ZS_RETURN_IF_ERROR(ZS_CUDA_STATUS(context_, runtime->SetAsync(data, 0, bytes, stream_)));
  return context_->OrderAllAfter(stream_);
}

void DeviceMemory::Free(void* data) {
  if (!context_->Enter().ok()) return;  // nothing can be freed any more
  Runtime* const runtime = context_->runtime();
  ZS_CUDA_STATUS(context_, runtime->FreeAsync(data, stream_)).IgnoreError();
}

absl::Status DeviceMemory::Exhausted(size_t bytes, MemoryKind kind) const {
  std::string text = absl::StrCat(context_->name(), ": no ", bytes, " bytes for ", NameOf(kind),
                                  "; this worker uses ", accounting_.TotalBytes(), " bytes (");
  for (int i = 0; i < kMemoryKinds; ++i) {
    const auto of = static_cast<MemoryKind>(i);
    absl::StrAppend(&text, i == 0 ? "" : ", ", NameOf(of), " ", accounting_.Bytes(of));
  }
  size_t free = 0, total = 0;
  if (context_->runtime()->MemoryInfo(&free, &total) == Error::kOk) {
    absl::StrAppend(&text, "), and ", free, " of the GPU's ", total, " are free");
  } else {
    absl::StrAppend(&text, ") of the GPU's ", context_->properties().total_bytes);
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(text,
                   ". Use more workers, a higher ZeRO stage, a smaller micro-batch or activation "
                   "checkpointing; nvidia-smi shows who else uses the GPU"));
}

}  // namespace zeroshard::cuda
