// A durable log in memory that forgets and fails on demand.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "coordinator/core/durable_log.h"

namespace zeroshard::coordinator {

class MemoryLog : public DurableLog {
 public:
  absl::StatusOr<LoadedState> Load() override {
    LoadedState state;
    for (const std::vector<LogRecord>& batch : batches_) {
      for (const LogRecord& record : batch) Apply(record, &state);
    }
    return state;
  }

  absl::Status Append(const std::vector<LogRecord>& records) override {
    if (fail_) return absl::ResourceExhaustedError("the disk is full");
    if (!records.empty()) batches_.push_back(records);
    return absl::OkStatus();
  }

  void FailFromNowOn() { fail_ = true; }
  size_t batches() const { return batches_.size(); }

 private:
  std::vector<std::vector<LogRecord>> batches_;
  bool fail_ = false;
};

}  // namespace zeroshard::coordinator
