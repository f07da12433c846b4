#include "worker/comm/nccl/nccl_end.h"

#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

namespace zeroshard {

bool CallWithin(absl::Duration timeout, std::function<void()> call) {
  auto done = std::make_shared<absl::Notification>();
  std::thread thread([done, call = std::move(call)] {
    call();
    done->Notify();
  });
  const bool in_time = done->WaitForNotificationWithTimeout(timeout);
  if (in_time) {
    thread.join();
  } else {
    thread.detach();
  }
  return in_time;
}

bool AbortComm(NcclApi* api, NcclComm* comm, const NcclEnding& ending, const std::string& who,
               const std::string& why) {
  const bool ended = CallWithin(ending.timeout, [api, comm] {
    api->EnterThread();
    api->Abort(comm);
  });
  if (ended) return true;
  ending.exit_process(absl::StrCat(
      who, ": ncclCommAbort did not return within ", absl::FormatDuration(ending.timeout),
      " (the collectives were being ended because of: ", why,
      "); the process exits, for its work on the GPU cannot be stopped otherwise. Whoever "
      "supervises it starts it again; if this repeats, look at the GPU (nvidia-smi, dmesg)"));
  return false;
}

}  // namespace zeroshard
