// The engine for where io_uring is refused: threads that call pread and pwrite, and one that looks
// after the time.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/log.h"
#include "common/status_macros.h"
#include "shard_store/nvme/aio.h"
#include "shard_store/nvme/operation.h"

namespace zeroshard::nvme {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPause(1);

// Outlives the engine where a thread hangs in the kernel.
struct State {
  struct Slot {
    std::unique_ptr<Operation> operation;
    bool in_kernel = false;  // a thread has it
    bool abandoned = false;  // its caller has been told
  };

  AsyncIoOptions options;
  std::chrono::nanoseconds limit;
  std::mutex mutex;
  std::condition_variable work, time;
  std::deque<std::unique_ptr<Operation>> waiting;
  std::vector<Slot> slots;  // by thread; those of operations that hang without a thread follow
  absl::Status broken;
  bool stopping = false;

  bool Overdue(const Operation& operation, Moment now) const {
    return operation.started && now - operation.since > limit;
  }
  std::unique_ptr<Operation> Next(std::unique_lock<std::mutex>* lock);
  void Work(size_t me);
  void WatchTime();
};

// The next that may run; none where the engine ends. What waits for a retry does not end it.
std::unique_ptr<Operation> State::Next(std::unique_lock<std::mutex>* lock) {
  while (true) {
    const Moment now = steady_clock::now();
    Moment until = now + std::chrono::seconds(5);
    for (auto it = waiting.begin(); it != waiting.end(); ++it) {
      if ((*it)->not_before <= now || !broken.ok()) {
        std::unique_ptr<Operation> operation = std::move(*it);
        waiting.erase(it);
        return operation;
      }
      until = std::min(until, (*it)->not_before);
    }
    if (stopping && waiting.empty()) return nullptr;
    work.wait_until(*lock, until);
  }
}

void State::Work(size_t me) {
  std::unique_lock<std::mutex> lock(mutex);
  while (std::unique_ptr<Operation> operation = Next(&lock)) {
    const absl::Status refused = operation->refused.ok() ? broken : operation->refused;
    if (!refused.ok()) {
      lock.unlock();
      operation->Finish(refused);
      operation.reset();
      lock.lock();
      continue;
    }
    if (!operation->started) {
      operation->started = true;
      operation->since = steady_clock::now();
    }
    Operation* const mine = operation.get();
    slots[me] = {std::move(operation), true, false};
    time.notify_one();
    lock.unlock();
    const DiskHook::Verdict verdict = mine->Ask(options.hook);
    if (verdict.what == DiskHook::Verdict::kHang) {
      lock.lock();
      slots.push_back({std::move(slots[me].operation), false, slots[me].abandoned});
      slots[me] = Slot();
      time.notify_one();
      continue;
    }
    int64_t result = verdict.result;
    if (verdict.what == DiskHook::Verdict::kDo) {
      const off_t offset = static_cast<off_t>(mine->offset + mine->done);
      result = mine->write ? pwrite(mine->file->fd(), mine->data(), verdict.bytes, offset)
                           : pread(mine->file->fd(), mine->data(), verdict.bytes, offset);
      if (result < 0) result = -errno;
    }
    lock.lock();
    operation = std::move(slots[me].operation);
    const bool abandoned = slots[me].abandoned;
    slots[me] = Slot();
    if (abandoned) {
      lock.unlock();
      operation.reset();
      lock.lock();
      continue;
    }
    absl::Status status;
    Answer answer = Take(operation.get(), result, &status);
    const Moment now = steady_clock::now();
    if (answer != Answer::kFinished && Overdue(*operation, now)) {
      status = operation->Stalled(options.stall_limit);
      answer = Answer::kFinished;
    }
    if (answer == Answer::kFinished) {
      lock.unlock();
      operation->Finish(status);
      operation.reset();
      lock.lock();
      continue;
    }
    if (answer == Answer::kLater) operation->not_before = now + kPause;
    waiting.push_front(std::move(operation));
  }
}

void State::WatchTime() {
  std::unique_lock<std::mutex> lock(mutex);
  while (true) {
    const Moment now = steady_clock::now();
    Moment until = now + std::chrono::seconds(5);
    AsyncIo::Done call;
    absl::Status status;
    bool live = false;
    for (Slot& slot : slots) {
      if (slot.operation == nullptr || slot.abandoned) continue;
      live = true;
      if (!Overdue(*slot.operation, now)) {
        until = std::min(until, slot.operation->since + limit + kPause);
        continue;
      }
      status = slot.operation->Stalled(options.stall_limit);
      call = std::exchange(slot.operation->callback, nullptr);
      if (slot.in_kernel) {
        slot.abandoned = true;
      } else {
        slot = Slot();
      }
      break;
    }
    if (!status.ok()) {
      const bool first = broken.ok();
      if (first) broken = status;
      lock.unlock();
      if (first) LogError(status.message());
      work.notify_all();
      if (call) call(status, IoBuffer());
      lock.lock();
      continue;
    }
    if (stopping && !live && waiting.empty()) return;
    time.wait_until(lock, stopping ? std::min(until, now + kPause) : until);
  }
}

class ThreadIo : public AsyncIo {
 public:
  explicit ThreadIo(const AsyncIoOptions& options) : state_(std::make_shared<State>()) {
    state_->options = options;
    state_->limit = absl::ToChronoNanoseconds(options.stall_limit);
    const size_t count = static_cast<size_t>(std::min(options.threads, options.depth));
    state_->slots.resize(count);
    threads_.reserve(count);
  }

  absl::Status Start() {
    for (size_t i = 0; i < state_->slots.size(); ++i) {
      std::thread thread;
      ZS_RETURN_IF_ERROR(StartIoThread(
          state_->options, [state = state_, i] { state->Work(i); }, &thread));
      threads_.push_back(std::move(thread));
    }
    return StartIoThread(
        state_->options, [state = state_] { state->WatchTime(); }, &watch_);
  }

  ~ThreadIo() override {
    {
      std::lock_guard<std::mutex> lock(state_->mutex);
      state_->stopping = true;
    }
    state_->work.notify_all();
    state_->time.notify_one();
    if (watch_.joinable()) watch_.join();  // nothing is left now that could still be answered
    int held = 0;
    for (size_t i = 0; i < threads_.size(); ++i) {
      bool stuck;
      {
        std::lock_guard<std::mutex> lock(state_->mutex);
        stuck = state_->slots[i].abandoned;
      }
      held += stuck ? 1 : 0;
      stuck ? threads_[i].detach() : threads_[i].join();
    }
    if (held > 0) {
      LogError("the kernel still has ", held, " operations on the disk of --nvme-dir; their ",
               "threads and buffers are given up until it answers");
    }
  }

  const char* engine() const override { return "threads"; }

 private:
  void Submit(std::unique_ptr<Operation> operation) override {
    {
      std::lock_guard<std::mutex> lock(state_->mutex);
      state_->waiting.push_back(std::move(operation));
    }
    state_->work.notify_one();
  }

  const std::shared_ptr<State> state_;
  std::vector<std::thread> threads_;
  std::thread watch_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<AsyncIo>> MakeThreadIo(const AsyncIoOptions& options) {
  auto io = std::make_unique<ThreadIo>(options);
  ZS_RETURN_IF_ERROR(io->Start());
  return io;
}

}  // namespace zeroshard::nvme
