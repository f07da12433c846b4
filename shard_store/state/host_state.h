// A job's state with what it borrows. Within this library.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>

#include "shard_store/state/caught.h"
#include "shard_store/state/host_job.h"

namespace zeroshard::store {

struct HostJob::HeldState {
  HeldState(std::atomic<uint64_t>* held, std::atomic<uint64_t>* disk_held)
      : held(*held), disk_held(*disk_held) {}
  ~HeldState() { Release(); }

  // What it has of the budgets counts as held from now on. Under the job's lock.
  void Claim(uint64_t bytes, uint64_t disk_bytes) {
    held += bytes - claimed;
    disk_held += disk_bytes - disk_claimed;
    claimed = bytes;
    disk_claimed = disk_bytes;
  }
  void Release() { Claim(0, 0); }

  std::atomic<uint64_t>& held;
  std::atomic<uint64_t>& disk_held;
  uint64_t claimed = 0, disk_claimed = 0;
  bool dropped = false;  // nobody is to use it any more
  std::unique_ptr<const ModelTable> model;
  std::unique_ptr<JobState> state;  // goes before the model
};

// A snapshot that is written by a thread of its own.
struct HostJob::Writer {
  uint64_t number = 0;  // they end in this order
  uint64_t life = 0, step = 0;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  std::shared_ptr<HeldState> state;
  std::atomic<bool> stop = false;  // it was given up; set under the job's lock
};

}  // namespace zeroshard::store
