#include "worker/device/cuda/stream.h"

#include <pthread.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace zeroshard::cuda {
namespace {

// Whether work after `event` can be enqueued without the host waiting.
bool CanFollow(const Event& event) {
  if (const GpuEvent* gpu = AsGpuEvent(event)) return gpu->Recorded();
  return event.Done();
}

void AwaitOnHost(const Event& event) {
  if (GpuEvent* gpu = AsGpuEvent(event)) {
    gpu->AwaitRecorded().status().IgnoreError();  // Enqueue asks again
  } else {
    event.Wait().IgnoreError();
  }
}

void Append(std::vector<Event>* sources, std::vector<Event> more) {
  for (Event& event : more) sources->push_back(std::move(event));
}

}  // namespace

CudaStream::CudaStream(std::shared_ptr<Context> context, const std::string& name,
                       bool high_priority, HostEvents host_events)
    : context_(std::move(context)), name_(name), host_events_(host_events) {
  Runtime* const runtime = context_->runtime();
  made_ = context_->Enter();
  if (made_.ok()) {
    made_ = ZS_CUDA_STATUS(context_, runtime->CreateStream(high_priority, &stream_));
  }
  if (made_.ok()) {
    runtime->NameStream(stream_, absl::StrCat(context_->name(), " ", name_));
    made_ = context_->AddStream(stream_);
  }
}

CudaStream::~CudaStream() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (stream_ == nullptr) return;
  context_->RemoveStream(stream_);
  Runtime* const runtime = context_->runtime();
  if (!context_->Enter().ok()) return;  // the process ends soon, and the driver frees the stream
  ZS_CUDA_STATUS(context_, runtime->SynchronizeStream(stream_)).IgnoreError();
  runtime->DestroyStream(stream_);
}

Event CudaStream::Copy(void* to, const void* from, size_t bytes, const Event& after) {
  return Submit(
      [this, to, from, bytes](StreamHandle stream) {
        if (bytes == 0) return absl::OkStatus();
        Runtime* const runtime = context_->runtime();
        return ZS_CUDA_STATUS(context_, runtime->CopyAsync(to, from, bytes, stream));
      },
      after);
}

Event CudaStream::Submit(Work work, const Event& after) {
  return Push({.kind = Item::kWork, .work = std::move(work), .after = after});
}

Event CudaStream::Record() { return Push({.kind = Item::kRecord}); }

absl::Status CudaStream::WaitFor(const Event& event) {
  if (event.Done()) return event.Wait();
  Push({.kind = Item::kWait, .after = event});
  // Where the caller had to wait it may have ended meanwhile.
  return event.Done() ? event.Wait() : absl::OkStatus();
}

absl::StatusOr<StreamHandle> CudaStream::handle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return deferred_.empty(); });
  if (!made_.ok()) return made_;
  return stream_;
}

void CudaStream::AddError(const absl::Status& status) {
  std::lock_guard lock(mutex_);
  first_error_.Update(status);
}

Event CudaStream::Push(Item item) {
  item.done = std::make_shared<CudaEvent>(context_);
  Event event(item.done);
  std::unique_lock lock(mutex_);
  if (deferred_.empty() && !CanFollow(item.after)) {
    if (host_events_ == HostEvents::kBlock) {
      lock.unlock();
      AwaitOnHost(item.after);
      lock.lock();
    }
  }
  if (deferred_.empty() && CanFollow(item.after)) {
    Enqueue(&item);
    return event;
  }
  deferred_.push_back(std::move(item));
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { Loop(); });
    pthread_setname_np(thread_.native_handle(), name_.substr(0, 15).c_str());
  }
  changed_.notify_all();
  return event;
}

void CudaStream::Loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || !deferred_.empty(); });
    if (deferred_.empty()) return;
    const Event after = deferred_.front().after;
    lock.unlock();
    AwaitOnHost(after);
    lock.lock();
    Enqueue(&deferred_.front());
    deferred_.pop_front();
    changed_.notify_all();
  }
}

// Makes the stream wait for `after`, which CanFollow. Its error, where it has one already.
absl::Status CudaStream::EnqueueAfter(const Event& after) {
  GpuEvent* const gpu = AsGpuEvent(after);
  if (gpu == nullptr) return after.Wait();
  ZS_ASSIGN_OR_RETURN(EventHandle native, gpu->AwaitRecorded());
  if (native != nullptr) {
    Runtime* const runtime = context_->runtime();
    const absl::Status waits = ZS_CUDA_STATUS(context_, runtime->WaitEvent(stream_, native));
    if (!waits
             .ok()) {  // the order is lost: nothing that is recorded from here on is to be believed
      first_error_.Update(waits);
      return waits;
    }
  }
  return gpu->KnownError();
}

void CudaStream::Enqueue(Item* item) {
  absl::Status status = made_;
  status.Update(context_->Enter());
  if (!status.ok()) {
    first_error_.Update(status);
    item->work = nullptr;
    item->done->SetFailed(std::move(status));
    return;
  }
  if (item->kind == Item::kRecord) {
    Finish(item, std::exchange(first_error_, absl::OkStatus()), std::exchange(sources_, {}));
    return;
  }
  status = EnqueueAfter(item->after);
  if (item->kind == Item::kWait) {  // failed or not; nobody sees the event
    item->done->SetFailed(std::move(status));
    return;
  }
  std::vector<Event> sources;
  if (status.ok()) {
    sources = SourcesOf(item->after);
    status = item->work(stream_);
  }
  item->work = nullptr;  // what it owns is gone before anyone is told
  first_error_.Update(status);
  while (!sources_.empty() && sources_.front().Done()) {
    first_error_.Update(sources_.front().Wait());
    sources_.erase(sources_.begin());
  }
  Append(&sources_, sources);
  Finish(item, std::move(status), std::move(sources));
}

// Also after an error: a part of the work may have been enqueued.
void CudaStream::Finish(Item* item, absl::Status status, std::vector<Event> sources) {
  Runtime* const runtime = context_->runtime();
  absl::StatusOr<EventHandle> native = context_->TakeEvent();
  if (native.ok()) {
    const absl::Status recorded = ZS_CUDA_STATUS(context_, runtime->RecordEvent(*native, stream_));
    if (!recorded.ok()) {
      context_->GiveEvent(*native);
      native = recorded;
    }
  }
  if (!native.ok()) {
    status.Update(native.status());
    item->done->SetFailed(std::move(status));
    return;
  }
  item->done->SetRecorded(*native, std::move(status), std::move(sources));
}

}  // namespace zeroshard::cuda
