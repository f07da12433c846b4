// Work on file systems that may hang: a shared folder whose server is gone.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace zeroshard::coordinator {

// Thread-safe.
class DiskWork {
 public:
  // At most `most` pieces of work at a time.
  explicit DiskWork(size_t most);
  // Ends what has not ended with UNAVAILABLE. Waits a second for threads that are at work; one that
  // hangs in the system is left behind, for the end of the process.
  ~DiskWork();

  // Runs `work` on a thread of its own, then `done` once: there with what `work` returned; or
  // elsewhere with DEADLINE_EXCEEDED, naming `what`, after `patience`; or at once with
  // RESOURCE_EXHAUSTED. As the thread may be left behind, `work` owns what it uses.
  void Run(const std::string& what, absl::Duration patience, std::function<absl::Status()> work,
           std::function<void(const absl::Status&)> done);

 private:
  struct Task;
  void Main();

  const size_t most_;
  const std::shared_ptr<std::atomic<size_t>> running_ = std::make_shared<std::atomic<size_t>>(0);
  std::mutex mutex_;
  std::condition_variable changed_;
  // By when they must have ended.
  std::multimap<std::chrono::steady_clock::time_point, std::shared_ptr<Task>> tasks_;
  bool closing_ = false;
  std::thread timer_;
};

}  // namespace zeroshard::coordinator
