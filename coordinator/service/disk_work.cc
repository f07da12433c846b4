#include "coordinator/service/disk_work.h"

#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace zeroshard::coordinator {
namespace {

using Steady = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLook(10);
constexpr int kLooks = 100;

}  // namespace

// Told once how it ended, whoever is first.
struct DiskWork::Task {
  std::string what;
  absl::Duration patience;
  std::mutex mutex;
  std::function<void(const absl::Status&)> done;

  void Finish(const absl::Status& status) {
    std::function<void(const absl::Status&)> call;
    {
      std::lock_guard<std::mutex> lock(mutex);
      call.swap(done);
    }
    if (call) call(status);
  }
};

DiskWork::DiskWork(size_t most) : most_(most), timer_([this] { Main(); }) {}

DiskWork::~DiskWork() {
  std::vector<std::shared_ptr<Task>> left;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    for (const auto& [end, task] : tasks_) left.push_back(task);
    tasks_.clear();
  }
  changed_.notify_all();
  timer_.join();
  for (const std::shared_ptr<Task>& task : left) {
    task->Finish(absl::UnavailableError("the coordinator is shutting down"));
  }
  for (int i = 0; i<kLooks&& * running_> 0; ++i) std::this_thread::sleep_for(kLook);
}

void DiskWork::Run(const std::string& what, absl::Duration patience,
                   std::function<absl::Status()> work,
                   std::function<void(const absl::Status&)> done) {
  if (running_->fetch_add(1) >= most_) {
    running_->fetch_sub(1);
    done(absl::ResourceExhaustedError(absl::StrCat(
        what, ": ", most_, " requests wait for file systems already; does one of them hang?")));
    return;
  }
  auto task = std::make_shared<Task>();
  task->what = what;
  task->patience = patience;
  task->done = std::move(done);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.emplace(Steady::now() + absl::ToChronoNanoseconds(patience), task);
  }
  changed_.notify_all();
  try {
    std::thread([task, work = std::move(work), running = running_] {
      absl::Status status;
      try {
        status = work();
      } catch (const std::exception& error) {
        status = absl::InternalError(absl::StrCat(task->what, ": ", error.what()));
      }
      // Not at work any more when whoever waits hears of it.
      running->fetch_sub(1);
      task->Finish(status);
    }).detach();
  } catch (const std::system_error& error) {
    running_->fetch_sub(1);
    task->Finish(absl::ResourceExhaustedError(
        absl::StrCat(what, ": cannot start a thread: ", error.what())));
  }
}

void DiskWork::Main() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closing_) {
    if (tasks_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const Steady::time_point first = tasks_.begin()->first;
    if (Steady::now() < first) {
      changed_.wait_until(lock, first);
      continue;
    }
    const std::shared_ptr<Task> task = tasks_.begin()->second;
    tasks_.erase(tasks_.begin());
    lock.unlock();
    task->Finish(absl::DeadlineExceededError(
        absl::StrCat(task->what, ": the file system did not answer the coordinator within ",
                     absl::FormatDuration(task->patience), "; is its server there?")));
    lock.lock();
  }
}

}  // namespace zeroshard::coordinator
