// Lets one thread end what another waits for: a stream of gRPC's, or a pause.
#pragma once

#include <condition_variable>
#include <mutex>

#include "absl/time/time.h"
#include "grpcpp/client_context.h"

namespace zeroshard {

// Thread-safe. Once stopped it stays so.
class StopToken {
 public:
  void Stop();
  bool stopped() const;

  // Waits; true when stopped, before the time is over.
  bool SleepFor(absl::Duration duration);

  // While it lives, Stop cancels the call. One at a time.
  class Call {
   public:
    Call(StopToken* token, grpc::ClientContext* context);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    StopToken* const token_;
  };

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  grpc::ClientContext* call_ = nullptr;
};

}  // namespace zeroshard
