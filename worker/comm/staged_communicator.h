// Collectives over memory of a device that the host cannot reach, by way of host memory and a
// communicator that knows only that: Gloo. So several workers may share a host, or one GPU, which
// NCCL refuses.
#pragma once

#include <memory>

#include "worker/comm/communicator.h"

namespace zeroshard {

// Each operation copies what this rank contributes to host memory, after `after`, on a stream of
// its own; runs `inner` behind that; and copies what it brought to the device's memory on another
// stream. So do the messages of an exchange: all copies to the host, `inner`'s exchange, all copies
// back. The contract is communicator.h's; besides, an operation's event has the error of a copy
// that failed, and RESOURCE_EXHAUSTED where the host has no memory, which aborts `inner`.
// At most kStagedOperations have host memory at a time, each as much as the largest had: one more
// waits for the oldest within the call. Buffers stay between operations.
// The destructor aborts what is pending and waits for the copies.
inline constexpr size_t kStagedOperations = 8;
std::unique_ptr<Communicator> MakeStagedCommunicator(std::unique_ptr<Communicator> inner,
                                                     Device* device);

}  // namespace zeroshard
