// A job's state with what it borrows. Within this library.
#pragma once

#include <atomic>
#include <memory>

#include "shard_store/state/host_job.h"

namespace zeroshard::store {

struct HostJob::HeldState {
  explicit HeldState(std::atomic<uint64_t>* held) : held(*held) {}
  ~HeldState() { Release(); }

  // What it has of the budget counts as held from now on.
  void Claim(uint64_t bytes) {
    held += bytes - claimed;
    claimed = bytes;
  }
  void Release() { Claim(0); }

  std::atomic<uint64_t>& held;
  uint64_t claimed = 0;
  std::unique_ptr<const ModelTable> model;
  std::unique_ptr<JobState> state;  // goes before the model
};

}  // namespace zeroshard::store
