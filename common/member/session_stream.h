// One connection of a member to Cluster.Session, on gRPC's callback interface: no call here blocks,
// so that a coordinator that stopped reading cannot hold up a heartbeat's thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/client_callback.h"
#include "zeroshard/v1/cluster.grpc.pb.h"

namespace zeroshard {

// Something happened: woken waiters look what it was. Thread-safe; waits may end early.
class Wakeup {
 public:
  void Notify();
  void WaitFor(absl::Duration timeout);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool notified_ = false;
};

// Thread-safe. Lives until its owner let go of it and gRPC is done with it.
class SessionStream final
    : public grpc::ClientBidiReactor<v1::MemberMessage, v1::CoordinatorMessage>,
      public std::enable_shared_from_this<SessionStream> {
 public:
  // Called on gRPC's threads, one message at a time, never after Ended().
  using Receiver = std::function<void(const v1::CoordinatorMessage&)>;

  // Connects and sends `hello`. `wakeup` is notified when the stream has ended and
  // when all that was sent has been handed to the transport.
  static std::shared_ptr<SessionStream> Open(v1::Cluster::Stub* stub, v1::MemberMessage hello,
                                             std::shared_ptr<Wakeup> wakeup, Receiver receiver);

  // Sends after what was sent before. `last`: nothing follows. Ignored once the stream is ending.
  void Send(v1::MemberMessage message, bool last = false);
  // Messages sent but not yet handed to the transport.
  size_t Pending() const;
  // Ends the stream; the first reason becomes its status.
  void Cancel(absl::Status reason);

  bool Ended() const;
  // Why it ended; OK if the coordinator closed it in order.
  absl::Status status() const;

 private:
  SessionStream(std::shared_ptr<Wakeup> wakeup, Receiver receiver)
      : wakeup_(std::move(wakeup)), receiver_(std::move(receiver)) {}

  void StartNextWrite(std::unique_lock<std::mutex> lock);
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  const std::shared_ptr<Wakeup> wakeup_;
  const Receiver receiver_;
  grpc::ClientContext context_;
  v1::CoordinatorMessage incoming_;

  mutable std::mutex mutex_;
  std::deque<std::pair<v1::MemberMessage, bool>> queue_;
  v1::MemberMessage outgoing_;  // what the write under way reads
  bool writing_ = false;
  bool closing_ = false;  // no further write may start
  bool ended_ = false;
  absl::Status cancelled_;
  absl::Status status_;
  std::shared_ptr<SessionStream> self_;  // until gRPC is done
};

}  // namespace zeroshard
