// A stream that is a host thread: file work, Gloo's collectives, copies on the CPU.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "worker/device/device.h"

namespace zeroshard {

class HostStream : public Stream {
 public:
  // Runs `work` after everything enqueued before it; the event carries its status. Work that
  // follows a failed one still runs: whoever waits decides.
  virtual Event Enqueue(std::function<absl::Status()> work) = 0;
};

// Runs closures in order on a thread of its own, named after `name` (15 characters show up in the
// system's tools). The destructor waits until all that was enqueued has run, and joins; it must not
// run on the stream's own thread. An exception leaves a closure as an INTERNAL status. A WaitFor
// only orders: an event that failed holds nothing back.
std::unique_ptr<HostStream> MakeHostStream(const std::string& name);

// Copies at once on the caller's thread, which waits for what a copy is told to start after: the
// compute stream of the CPU. Every event is done when it is returned.
std::unique_ptr<Stream> MakeInlineStream();

}  // namespace zeroshard
