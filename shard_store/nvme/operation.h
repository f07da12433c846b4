// One read or write on its way, for the two engines of aio.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "shard_store/nvme/aio.h"

namespace zeroshard::nvme {

using Moment = std::chrono::steady_clock::time_point;

struct Operation {
  bool write = false;
  std::shared_ptr<const DirectFile> file;
  uint64_t offset = 0;
  uint32_t bytes = 0;
  IoBuffer buffer;
  AsyncIo::Done callback;
  IoCounters* counters = nullptr;
  absl::Status refused;  // why it may not be tried at all

  uint32_t done = 0;  // bytes, a multiple of kAlignment until all are
  int idle = 0;       // answers in a row that brought nothing on
  bool started = false;
  Moment since;       // when the kernel first got it
  Moment not_before;  // of a retry

  char* data() const { return buffer.data() + done; }
  // What to ask for next, as the hook allows it; kPretend and kHang are for the engine.
  DiskHook::Verdict Ask(DiskHook* hook) const;
  // "read 4096 bytes at 8192 of /a/b"
  std::string Text() const;
  absl::Status Stalled(absl::Duration limit) const;
  // Calls back; the buffer goes along.
  void Finish(const absl::Status& status);
};

enum class Answer { kFinished, kAgain, kLater };
// What the kernel answered (bytes, or a negative errno) to the rest of an operation. `status` is
// for kFinished. kLater: after a pause.
Answer Take(Operation* operation, int64_t result, absl::Status* status);

}  // namespace zeroshard::nvme
