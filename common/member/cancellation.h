// Ends the waits of one job from another thread.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/client_context.h"

namespace zeroshard {

// Thread-safe.
class Cancellation {
 public:
  // Ends every call in a Scope and every Wait, now and later. The first reason stays; it is not OK.
  void Cancel(absl::Status reason);
  // OK until cancelled.
  absl::Status status() const;
  bool cancelled() const { return !status().ok(); }
  // Waits for at most `timeout`; true if cancelled.
  bool Wait(absl::Duration timeout) const;

  // While it lives, Cancel cancels the call of `context`. `cancellation` may be null.
  class Scope {
   public:
    Scope(Cancellation* cancellation, grpc::ClientContext* context);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Cancellation* const cancellation_;
    grpc::ClientContext* const context_;
  };

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  absl::Status status_;
  std::set<grpc::ClientContext*> contexts_;
};

}  // namespace zeroshard
