// A shard store that a test holds back.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "worker/device/host_stream.h"
#include "worker/zero/state_store.h"

namespace zeroshard {

// Acknowledges as many pushes as the test says, in order, and reads each only then: as late as a
// store may. Memory of the host.
class HeldStore : public StateStore {
 public:
  struct Pushed {
    uint64_t step;
    int unit;
    int64_t begin, end;
    const void* data;
    std::vector<char> read = {};  // once it is acknowledged
  };
  // `type`: of gradients on the wire.
  explicit HeldStore(DType type = DType::kBF16) : type_(type) {}
  ~HeldStore() override {
    Acknowledge(1000);
    stream_.reset();
  }
  v1::StateVersion base() const override { return {}; }
  Event Push(uint64_t step, int unit, int64_t begin, int64_t end, const void* data,
             const Event& after) override {
    Pushed& push = pushed.emplace_back(Pushed{step, unit, begin, end, data});
    const size_t bytes = static_cast<size_t>(end - begin) * SizeOf(type_);
    return stream_->Enqueue([this, after, &push, bytes] {
      absl::Status status = after.Wait();
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return acknowledged_ > 0; });
      --acknowledged_;
      if (!status.ok()) return status;
      const char* data = static_cast<const char*>(push.data);
      push.read.assign(data, data + bytes);
      return error_;
    });
  }
  Event Pull(uint64_t, int, int64_t, int64_t, void*, const Event&) override { return {}; }
  absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord&, uint64_t, uint64_t) override {
    return v1::StepDecision();
  }
  void Abort(const std::string&) override {}
  const OffloadCounters& counters() const override { return counters_; }

  void Acknowledge(int pushes, absl::Status error = absl::OkStatus()) {
    std::lock_guard<std::mutex> lock(mutex_);
    acknowledged_ += pushes;
    error_ = std::move(error);
    changed_.notify_all();
  }
  std::deque<Pushed> pushed;  // a reference to one stays valid

 private:
  const DType type_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int acknowledged_ = 0;
  absl::Status error_;
  OffloadCounters counters_;
  std::unique_ptr<HostStream> stream_ = MakeHostStream("held");
};

}  // namespace zeroshard
