#include "common/member/session_stream.h"

#include <utility>

#include "common/grpc_status.h"

namespace zeroshard {

void Wakeup::Notify() {
  std::lock_guard<std::mutex> lock(mutex_);
  notified_ = true;
  changed_.notify_all();
}

void Wakeup::WaitFor(absl::Duration timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout), [this] { return notified_; });
  notified_ = false;
}

std::shared_ptr<SessionStream> SessionStream::Open(v1::Cluster::Stub* stub, v1::MemberMessage hello,
                                                   std::shared_ptr<Wakeup> wakeup,
                                                   Receiver receiver) {
  std::shared_ptr<SessionStream> stream(new SessionStream(std::move(wakeup), std::move(receiver)));
  stream->self_ = stream;
  stub->async()->Session(&stream->context_, stream.get());
  // Writes start outside of gRPC's callbacks: the hold keeps gRPC from ending the stream between
  // the decision to write and the write.
  stream->AddHold();
  stream->StartRead(&stream->incoming_);
  stream->StartCall();
  stream->Send(std::move(hello));
  return stream;
}

void SessionStream::Send(v1::MemberMessage message, bool last) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (closing_) return;
  queue_.emplace_back(std::move(message), last);
  StartNextWrite(std::move(lock));
}

size_t SessionStream::Pending() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.size() + (writing_ ? 1 : 0);
}

void SessionStream::Cancel(absl::Status reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) return;
    if (cancelled_.ok()) cancelled_ = std::move(reason);
  }
  context_.TryCancel();
}

bool SessionStream::Ended() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return ended_;
}

absl::Status SessionStream::status() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

void SessionStream::StartNextWrite(std::unique_lock<std::mutex> lock) {
  if (writing_ || closing_ || queue_.empty()) return;
  writing_ = true;
  outgoing_ = std::move(queue_.front().first);
  const bool last = queue_.front().second;
  queue_.pop_front();
  lock.unlock();
  if (last) {
    StartWriteLast(&outgoing_, grpc::WriteOptions());
  } else {
    StartWrite(&outgoing_);
  }
}

void SessionStream::OnReadDone(bool ok) {
  if (ok) {
    receiver_(incoming_);
    StartRead(&incoming_);
    return;
  }
  bool release = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    release = !writing_;  // else the write's end releases
  }
  if (release) RemoveHold();
}

void SessionStream::OnWriteDone(bool ok) {
  std::unique_lock<std::mutex> lock(mutex_);
  writing_ = false;
  if (closing_) {
    lock.unlock();
    RemoveHold();
    return;
  }
  // A failed write means a broken stream; the read that is always open reports it.
  if (!ok) return;
  const bool idle = queue_.empty();
  StartNextWrite(std::move(lock));
  if (idle) wakeup_->Notify();
}

void SessionStream::OnDone(const grpc::Status& status) {
  std::shared_ptr<SessionStream> self;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    status_ = cancelled_.ok() ? FromGrpcStatus(status) : cancelled_;
    self = std::move(self_);
  }
  wakeup_->Notify();
}

}  // namespace zeroshard
