// The engine over io_uring: one thread owns the ring; others hand it operations through a list and
// wake it with an eventfd.
#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/log.h"
#include "shard_store/nvme/aio.h"
#include "shard_store/nvme/operation.h"

namespace zeroshard::nvme {
namespace {

using std::chrono::steady_clock;

constexpr uint64_t kWake = UINT64_MAX;           // user_data of the eventfd's poll
constexpr uint64_t kRegion = uint64_t{1} << 30;  // the kernel registers at most this in one piece
constexpr std::chrono::milliseconds kPause(1);

// The device may still write into the buffer of such an operation: its memory is never used again.
void Keep(std::unique_ptr<Operation> operation) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const kept = new std::vector<std::unique_ptr<Operation>>;
  std::lock_guard<std::mutex> lock(*mutex);
  kept->push_back(std::move(operation));
}

class RingIo : public AsyncIo {
 public:
  RingIo(const AsyncIoOptions& options, std::shared_ptr<BufferArena> arena)
      : options_(options),
        limit_(absl::ToChronoNanoseconds(options.stall_limit)),
        arena_(std::move(arena)),
        slots_(static_cast<size_t>(options.depth)) {
    for (size_t i = slots_.size(); i-- > 0;) free_.push_back(i);
  }

  absl::Status Init();
  ~RingIo() override;
  const char* engine() const override { return "io_uring"; }

 private:
  struct Slot {
    std::unique_ptr<Operation> operation;
    bool in_kernel = false;
    bool abandoned = false;  // its caller has been told; the kernel still has the buffer
  };

  void Submit(std::unique_ptr<Operation> operation) override;
  void Main();
  // Takes what callers brought; false when there is nothing left to do, ever.
  bool Collect();
  void Launch(std::unique_ptr<Operation> operation);
  void Prepare(size_t index, uint32_t bytes);
  void OnAnswer(size_t index, int64_t result);
  void Wait();
  void ReapAll();
  void GiveUpStalled();
  void Break(const absl::Status& status);  // no operation is started from here on
  int BufferIndex(const char* data, uint32_t bytes) const;
  bool Overdue(const Operation& operation, Moment now) const {
    return operation.started && now - operation.since > limit_;
  }

  const AsyncIoOptions options_;
  const std::chrono::nanoseconds limit_;
  const std::shared_ptr<BufferArena> arena_;
  bool registered_ = false;
  bool ring_made_ = false;
  struct io_uring ring_ = {};
  int wake_ = -1;
  std::thread thread_;

  std::mutex mutex_;
  std::vector<std::unique_ptr<Operation>> incoming_;
  bool asleep_ = false;
  bool stopping_ = false;

  // The thread's own.
  std::deque<std::unique_ptr<Operation>> waiting_;
  std::vector<std::unique_ptr<Operation>> delayed_;
  std::vector<Slot> slots_;
  std::vector<size_t> free_;
  std::vector<std::pair<size_t, int64_t>> pretended_;
  absl::Status broken_;
  bool ring_usable_ = true;
  bool wake_armed_ = false;
  bool seen_stopping_ = false;
};

absl::Status RingIo::Init() {
  int error = options_.hook == nullptr ? 0 : options_.hook->OnRingSetup();
  if (error == 0) {
    error = -io_uring_queue_init(static_cast<unsigned>(options_.depth) + 1, &ring_, 0);
    ring_made_ = error == 0;
  }
  if (error != 0) {
    absl::Status status = absl::ErrnoToStatus(error, "io_uring_setup");
    if (error == ENOSYS || error == EPERM || error == EACCES || error == ENOMEM) {
      return absl::UnavailableError(absl::StrCat(
          "io_uring cannot be used here (", status.message(),
          error == EPERM || error == EACCES
              ? "; a container's seccomp profile or kernel.io_uring_disabled forbids it)"
              : ")"));
    }
    return status;
  }
  struct io_uring_probe* probe = io_uring_get_probe_ring(&ring_);
  const bool able = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) &&
                    io_uring_opcode_supported(probe, IORING_OP_WRITE) &&
                    (ring_.features & IORING_FEAT_EXT_ARG) != 0;
  if (probe != nullptr) io_uring_free_probe(probe);
  if (!able) {
    return absl::UnavailableError(
        "io_uring cannot be used here (the kernel is older than 5.11, the first whose io_uring has "
        "all that is used)");
  }
  if (arena_ != nullptr) {
    std::vector<struct iovec> regions;
    for (uint64_t at = 0; at < arena_->total_bytes(); at += kRegion) {
      regions.push_back({arena_->base() + at, std::min(kRegion, arena_->total_bytes() - at)});
    }
    error = options_.hook == nullptr ? 0 : options_.hook->OnRegisterBuffers();
    if (error == 0) {
      error =
          -io_uring_register_buffers(&ring_, regions.data(), static_cast<unsigned>(regions.size()));
    }
    registered_ = error == 0;
    if (error != 0) {
      LogInfo("the ", arena_->total_bytes(), " bytes of disk buffers are not registered with the ",
              "kernel (", absl::ErrnoToStatus(error, "io_uring_register").message(),
              "), so each transfer pins its pages anew; a higher limit of locked memory ",
              "(ulimit -l) would save that");
    }
  }
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_ < 0) return absl::ErrnoToStatus(errno, "cannot make an eventfd");
  return StartIoThread(
      options_, [this] { Main(); }, &thread_);
}

RingIo::~RingIo() {
  if (thread_.joinable()) {
    bool wake;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      wake = std::exchange(asleep_, false);
    }
    if (wake) eventfd_write(wake_, 1);
    thread_.join();
  }
  int held = 0;
  for (Slot& slot : slots_) {
    if (slot.operation == nullptr) continue;
    ++held;
    Keep(std::move(slot.operation));
  }
  if (held > 0) {
    LogError("the kernel still has ", held, " operations on the disk of --nvme-dir; their buffers ",
             "are given up until this process ends");
  }
  if (ring_made_) io_uring_queue_exit(&ring_);
  if (wake_ >= 0) close(wake_);
}

void RingIo::Submit(std::unique_ptr<Operation> operation) {
  bool wake;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    incoming_.push_back(std::move(operation));
    wake = std::exchange(asleep_, false);
  }
  if (wake) eventfd_write(wake_, 1);
}

bool RingIo::Collect() {
  const Moment now = steady_clock::now();
  for (size_t i = 0; i < delayed_.size();) {
    if (delayed_[i]->not_before > now && broken_.ok()) {
      ++i;
      continue;
    }
    waiting_.push_back(std::move(delayed_[i]));
    delayed_[i] = std::move(delayed_.back());
    delayed_.pop_back();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (std::unique_ptr<Operation>& operation : incoming_) waiting_.push_back(std::move(operation));
  incoming_.clear();
  const bool live = std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.operation != nullptr && !slot.abandoned;
  });
  asleep_ = false;
  return live || !waiting_.empty() || !delayed_.empty() || !stopping_;
}

void RingIo::Main() {
  while (Collect()) {
    while (!waiting_.empty() && (!free_.empty() || !broken_.ok())) {
      std::unique_ptr<Operation> operation = std::move(waiting_.front());
      waiting_.pop_front();
      Launch(std::move(operation));
    }
    // Answers may bring calls that start others; those are collected before this waits.
    if (!pretended_.empty()) {
      for (const auto& [index, result] : std::exchange(pretended_, {})) OnAnswer(index, result);
      continue;
    }
    Wait();
    ReapAll();
    GiveUpStalled();
  }
}

int RingIo::BufferIndex(const char* data, uint32_t bytes) const {
  if (!registered_ || data < arena_->base()) return -1;
  const uint64_t begin = static_cast<uint64_t>(data - arena_->base());
  if (begin + bytes > arena_->total_bytes()) return -1;
  // A buffer that two pieces share goes the ordinary way.
  return begin / kRegion == (begin + bytes - 1) / kRegion ? static_cast<int>(begin / kRegion) : -1;
}

void RingIo::Launch(std::unique_ptr<Operation> operation) {
  if (!operation->refused.ok()) return operation->Finish(operation->refused);
  if (!broken_.ok()) return operation->Finish(broken_);
  if (!operation->started) {
    operation->started = true;
    operation->since = steady_clock::now();
  }
  const size_t index = free_.back();
  free_.pop_back();
  const DiskHook::Verdict verdict = operation->Ask(options_.hook);
  slots_[index].operation = std::move(operation);
  if (verdict.what == DiskHook::Verdict::kPretend) pretended_.push_back({index, verdict.result});
  if (verdict.what == DiskHook::Verdict::kDo) Prepare(index, verdict.bytes);
}

void RingIo::Prepare(size_t index, uint32_t bytes) {
  struct io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  if (sqe == nullptr) {  // as many as there are slots and the eventfd's: nobody holds more
    pretended_.push_back({index, -EAGAIN});
    return;
  }
  const Operation& operation = *slots_[index].operation;
  const int buffer = BufferIndex(operation.data(), bytes);
  const int fd = operation.file->fd();
  const uint64_t offset = operation.offset + operation.done;
  if (operation.write) {
    buffer >= 0 ? io_uring_prep_write_fixed(sqe, fd, operation.data(), bytes, offset, buffer)
                : io_uring_prep_write(sqe, fd, operation.data(), bytes, offset);
  } else {
    buffer >= 0 ? io_uring_prep_read_fixed(sqe, fd, operation.data(), bytes, offset, buffer)
                : io_uring_prep_read(sqe, fd, operation.data(), bytes, offset);
  }
  io_uring_sqe_set_data64(sqe, index);
  slots_[index].in_kernel = true;
}

void RingIo::OnAnswer(size_t index, int64_t result) {
  Slot& slot = slots_[index];
  if (slot.operation == nullptr) return;
  std::unique_ptr<Operation> operation = std::move(slot.operation);
  const bool abandoned = slot.abandoned;
  slot = Slot();
  free_.push_back(index);
  if (abandoned) return;
  absl::Status status;
  Answer answer = Take(operation.get(), result, &status);
  const Moment now = steady_clock::now();
  if (answer != Answer::kFinished && Overdue(*operation, now)) {
    status = operation->Stalled(options_.stall_limit);
    answer = Answer::kFinished;
  }
  switch (answer) {
    case Answer::kFinished:
      operation->Finish(status);
      break;
    case Answer::kAgain:
      waiting_.push_front(std::move(operation));
      break;
    case Answer::kLater:
      operation->not_before = now + kPause;
      delayed_.push_back(std::move(operation));
      break;
  }
}

void RingIo::Wait() {
  if (!wake_armed_) {
    if (struct io_uring_sqe* sqe = io_uring_get_sqe(&ring_)) {
      io_uring_prep_poll_add(sqe, wake_, POLLIN);
      io_uring_sqe_set_data64(sqe, kWake);
      wake_armed_ = true;
    }
  }
  const Moment now = steady_clock::now();
  Moment until = now + std::chrono::seconds(5);
  for (const Slot& slot : slots_) {
    if (slot.operation != nullptr && !slot.abandoned) {
      until = std::min(until, slot.operation->since + limit_ + kPause);
    }
  }
  for (const auto& operation : delayed_) until = std::min(until, operation->not_before);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool news = !incoming_.empty() || (stopping_ && !std::exchange(seen_stopping_, true));
    if (news || (!waiting_.empty() && !free_.empty())) until = now;
    asleep_ = true;  // from here on who submits wakes the ring
  }
  const auto wait = std::max(std::chrono::nanoseconds(0), until - now);
  if (!ring_usable_) {  // then there is nothing to wait on but what callers bring
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(wait, kPause));
    return;
  }
  struct __kernel_timespec timeout = {};
  timeout.tv_sec = wait.count() / 1'000'000'000;
  timeout.tv_nsec = wait.count() % 1'000'000'000;
  struct io_uring_cqe* cqe = nullptr;
  const int result = io_uring_submit_and_wait_timeout(&ring_, &cqe, 1, &timeout, nullptr);
  if (result < 0 && result != -ETIME && result != -EINTR && result != -EAGAIN && result != -EBUSY) {
    ring_usable_ = false;
    Break(absl::ErrnoToStatus(-result, "io_uring_enter, with which the disk is read and written"));
  }
}

void RingIo::ReapAll() {
  while (true) {
    struct io_uring_cqe* cqe = nullptr;
    if (io_uring_peek_cqe(&ring_, &cqe) != 0 || cqe == nullptr) return;
    const uint64_t data = io_uring_cqe_get_data64(cqe);
    const int64_t result = cqe->res;
    io_uring_cqe_seen(&ring_, cqe);
    if (data == kWake) {
      eventfd_t count;
      (void)eventfd_read(wake_, &count);
      wake_armed_ = false;
    } else if (data < slots_.size()) {
      OnAnswer(static_cast<size_t>(data), result);
    }
  }
}

void RingIo::GiveUpStalled() {
  const Moment now = steady_clock::now();
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.operation == nullptr || slot.abandoned) continue;
    if (ring_usable_ && !Overdue(*slot.operation, now)) continue;
    const absl::Status status =
        ring_usable_ ? slot.operation->Stalled(options_.stall_limit) : broken_;
    const Done call = std::exchange(slot.operation->callback, nullptr);
    if (slot.in_kernel) {
      slot.abandoned = true;
    } else {
      slot = Slot();
      free_.push_back(i);
    }
    Break(status);
    if (call) call(status, IoBuffer());
  }
}

void RingIo::Break(const absl::Status& status) {
  if (!broken_.ok()) return;
  broken_ = status;
  LogError(status.message());
}

}  // namespace

absl::StatusOr<std::unique_ptr<AsyncIo>> MakeRingIo(const AsyncIoOptions& options,
                                                    std::shared_ptr<BufferArena> arena) {
  auto ring = std::make_unique<RingIo>(options, std::move(arena));
  if (absl::Status status = ring->Init(); !status.ok()) return status;
  return ring;
}

}  // namespace zeroshard::nvme
