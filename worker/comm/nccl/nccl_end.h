// How a communicator of NCCL is got rid of, within a deadline or with the process.
#pragma once

#include <functional>
#include <string>

#include "absl/time/time.h"
#include "worker/comm/nccl/nccl_api.h"

namespace zeroshard {

struct NcclEnding {
  absl::Duration timeout = absl::Seconds(10);
  // How long a rank that is done waits for the others, whose last kernels may still read its
  // memory.
  absl::Duration grace = absl::Seconds(1);
  // What else can be done where the GPU's work cannot be stopped. Not to return.
  std::function<void(const std::string& message)> exit_process;
};

// Runs `call` on a thread of its own. False where it has not returned after `timeout`; the thread
// then stays behind, and what `call` refers to must too.
bool CallWithin(absl::Duration timeout, std::function<void()> call);

// Ends `comm` and what it has on the GPU; else the process, saying `who` and `why`. False where
// exit_process returned.
bool AbortComm(NcclApi* api, NcclComm* comm, const NcclEnding& ending, const std::string& who,
               const std::string& why);

}  // namespace zeroshard
