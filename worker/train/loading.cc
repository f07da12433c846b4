#include "worker/train/loading.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/status_macros.h"
#include "worker/train/agreement.h"

namespace zeroshard {
namespace {

// What a rank says of its tasks.
struct Flags {
  uint8_t ended = 0;    // all of them
  uint8_t failed = 0;   // any of them, and not because it was stopped
  uint8_t moved = 0;    // something was read since it last said so
  uint8_t give_up = 0;  // rank 0's
};

// This rank's tasks, on their threads.
class Tasks {
 public:
  explicit Tasks(const std::vector<LoadTask>& tasks) : statuses_(tasks.size()) {
    for (size_t i = 0; i < tasks.size(); ++i)
      threads_.emplace_back([this, i, &task = tasks[i]] { Run(task, i); });
  }
  ~Tasks() {
    signals_.stop = true;
    for (std::thread& thread : threads_)
      if (thread.joinable()) thread.join();
  }

  // True: all ended.
  bool WaitFor(std::chrono::milliseconds time) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, time, [this] { return ended_ == threads_.size(); });
  }
  bool failed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(statuses_.begin(), statuses_.end(), HasFailed);
  }
  // Of the first that failed, or was stopped where none did; once all ended.
  absl::Status status() {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = std::find_if(statuses_.begin(), statuses_.end(), HasFailed);
    if (found == statuses_.end())
      found = std::find_if(statuses_.begin(), statuses_.end(), absl::IsCancelled);
    return found == statuses_.end() ? absl::OkStatus() : *found;
  }
  LoadSignals& signals() { return signals_; }

 private:
  static bool HasFailed(const absl::Status& status) {
    return !status.ok() && !absl::IsCancelled(status);
  }

  void Run(const LoadTask& task, size_t i) {
    absl::Status status;
    try {
      status = task(&signals_);
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError("out of memory on this host while loading");
    } catch (const std::exception& error) {
      status = absl::InternalError(absl::StrCat("unexpected exception: ", error.what()));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    statuses_[i] = std::move(status);
    ++ended_;
    changed_.notify_all();
  }

  LoadSignals signals_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<absl::Status> statuses_;
  size_t ended_ = 0;
  std::vector<std::thread> threads_;
};

absl::Status NothingRead(const std::vector<Flags>& flags, absl::Duration deadline,
                         const std::string& what) {
  std::vector<std::string> ranks;
  for (size_t rank = 0; rank < flags.size(); ++rank)
    if (flags[rank].ended == 0) ranks.push_back(absl::StrCat(rank));
  const size_t more = ranks.size() > 3 ? ranks.size() - 3 : 0;
  ranks.resize(ranks.size() - more);
  return absl::DeadlineExceededError(absl::StrCat(
      what, ": nothing was read for ", absl::FormatDuration(deadline),
      " (timeouts.collective_seconds), and not all is read on rank ", absl::StrJoin(ranks, ", "),
      more > 0 ? absl::StrCat(" and ", more, " more") : "", "; look at the disks there"));
}

}  // namespace

absl::Status LoadTogether(Communicator* comm, absl::Duration deadline,
                          const std::atomic<bool>* stop, const std::string& what,
                          const std::vector<LoadTask>& given) {
  constexpr std::chrono::milliseconds kPoll(20);
  const absl::Duration slice = std::min(absl::Seconds(1), deadline / 4);
  Tasks tasks(given);
  std::vector<Flags> flags(static_cast<size_t>(comm->size()));
  uint64_t told = 0;
  absl::Time moved = absl::Now();
  const auto any = [&flags](uint8_t Flags::*flag) {
    return std::any_of(flags.begin(), flags.end(), [flag](const Flags& f) { return f.*flag != 0; });
  };
  bool all_ended = false;
  while (!all_ended) {
    Flags own;
    for (const absl::Time start = absl::Now(); absl::Now() - start < slice;) {
      if (tasks.WaitFor(kPoll)) break;
      if (stop != nullptr && *stop) return absl::CancelledError("stopped while loading");
    }
    own.ended = tasks.WaitFor(std::chrono::milliseconds(0)) ? 1 : 0;
    own.failed = tasks.failed() ? 1 : 0;
    const uint64_t bytes = tasks.signals().bytes;
    own.moved = bytes != told ? 1 : 0;
    told = bytes;
    // Rank 0's clock decides, so that all give up together.
    own.give_up = comm->rank() == 0 && absl::Now() - moved > deadline ? 1 : 0;
    flags[static_cast<size_t>(comm->rank())] = own;
    ZS_RETURN_IF_ERROR(comm->AllGatherHost(flags.data(), sizeof(Flags), {.unit = what}));
    if (any(&Flags::failed)) tasks.signals().stop = true;
    if (any(&Flags::moved)) moved = absl::Now();
    all_ended =
        std::all_of(flags.begin(), flags.end(), [](const Flags& f) { return f.ended != 0; });
    if (flags[0].give_up != 0 && !all_ended && !any(&Flags::moved))
      return NothingRead(flags, deadline, what);
  }
  absl::Status status = tasks.status();
  // Stopped because another rank failed, which has the reason.
  if (absl::IsCancelled(status) && any(&Flags::failed)) status = absl::OkStatus();
  return Agree(comm, status, what);
}

absl::Status SignallingSource::Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                                    float* out) const {
  if (signals_.stop) return absl::CancelledError("stopped while loading");
  ZS_RETURN_IF_ERROR(source_.Read(tensor, begin, end, out));
  signals_.bytes += static_cast<uint64_t>(end - begin) * sizeof(float);
  return absl::OkStatus();
}

}  // namespace zeroshard
