// A rendezvous for ranks that live in one process: a map that ranks wait on. Thread-safe.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"

namespace zeroshard {

class MemoryRendezvous : public Rendezvous {
 public:
  // ALREADY_EXISTS if the key holds another value: keys are never reused. The same value is
  // accepted, so that a retry is harmless.
  absl::Status Put(const std::string& key, const std::string& value) override {
    absl::MutexLock lock(&mutex_);
    auto [it, inserted] = values_.try_emplace(key, value);
    if (!inserted && it->second != value) {
      return absl::AlreadyExistsError(
          absl::StrCat("rendezvous key \"", key,
                       "\" already holds another value; two ranks claim the same place, or a "
                       "rendezvous was used twice"));
    }
    return absl::OkStatus();
  }

  // DEADLINE_EXCEEDED after `timeout` without the key; OK at once if it is there already.
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    auto there = [this, &key]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return values_.find(key) != values_.end();
    };
    absl::MutexLock lock(&mutex_);
    if (!mutex_.AwaitWithTimeout(absl::Condition(&there), timeout)) {
      return absl::DeadlineExceededError(absl::StrCat(
          "rendezvous key \"", key, "\" was not there after ", absl::FormatDuration(timeout)));
    }
    return values_.find(key)->second;
  }

  std::vector<std::string> Keys() const {
    absl::MutexLock lock(&mutex_);
    std::vector<std::string> keys;
    for (const auto& [key, value] : values_) keys.push_back(key);
    return keys;
  }

 private:
  mutable absl::Mutex mutex_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace zeroshard
