// A stream that is a host thread. CUDA workers use it too where work belongs on the host.
#pragma once

#include <memory>
#include <string>

#include "worker/device/device.h"

namespace zeroshard {

// Runs closures in order on a thread of its own, named after `name` (15 characters show up in the
// system's tools). The destructor waits until all that was enqueued has run, and joins; it must not
// run on the stream's own thread. An exception leaves a closure as an INTERNAL status. A WaitFor
// only orders: an event that failed holds nothing back.
std::unique_ptr<Stream> MakeHostStream(const std::string& name);

// Runs closures at once on the caller's thread: the compute stream of the CPU.
std::unique_ptr<Stream> MakeInlineStream();

}  // namespace zeroshard
