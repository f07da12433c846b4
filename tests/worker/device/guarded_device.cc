#include "tests/worker/device/guarded_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/types.h"

namespace zeroshard {
namespace {

// Of work that nobody waits for, where streams are lazy.
constexpr std::chrono::milliseconds kLaziness(5);

// Says when a stream's next piece of work may run. Outlives the stream in its events.
class Gate {
 public:
  Gate(Schedule schedule, uint64_t seed) : schedule_(schedule), random_(seed) {}

  uint64_t Enqueue() {
    std::lock_guard lock(mutex_);
    return ++enqueued_;
  }
  uint64_t enqueued() {
    std::lock_guard lock(mutex_);
    return enqueued_;
  }
  void Demand(uint64_t number) {
    std::lock_guard lock(mutex_);
    demanded_ = std::max(demanded_, number);
    changed_.notify_all();
  }
  void Hold(uint64_t number) {
    std::unique_lock lock(mutex_);
    if (schedule_ == Schedule::kLazy) {
      if (!changed_.wait_for(lock, kLaziness, [&] { return demanded_ >= number; })) {
        demanded_ = std::max(demanded_, enqueued_);
      }
    } else if (schedule_ == Schedule::kDelayed && random_() % 2 == 0) {
      const std::chrono::microseconds delay(random_() % 300);
      lock.unlock();
      std::this_thread::sleep_for(delay);
    }
  }

 private:
  const Schedule schedule_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::minstd_rand random_;
  uint64_t enqueued_ = 0, demanded_ = 0;
};

// Waiting for it is what lazy work is done for.
class DemandingEvent : public Event::State {
 public:
  DemandingEvent(std::shared_ptr<Gate> gate, uint64_t number, Event event)
      : gate_(std::move(gate)), number_(number), event_(std::move(event)) {}
  bool Done() const override { return event_.Done(); }
  absl::Status Wait() override {
    gate_->Demand(number_);
    return event_.Wait();
  }

 private:
  const std::shared_ptr<Gate> gate_;
  const uint64_t number_;
  const Event event_;
};

}  // namespace

class GuardedStream : public HostStream {
 public:
  GuardedStream(const GuardedDevice* device, const std::string& name, uint64_t seed)
      : device_(device),
        gate_(std::make_shared<Gate>(device->schedule(), seed)),
        stream_(MakeHostStream(name)) {}
  ~GuardedStream() override { gate_->Demand(std::numeric_limits<uint64_t>::max()); }

  Event Enqueue(std::function<absl::Status()> work) override {
    std::lock_guard lock(mutex_);
    const uint64_t number = gate_->Enqueue();
    Event event = stream_->Enqueue([gate = gate_, number, work = std::move(work)] {
      gate->Hold(number);
      return work();
    });
    return Event(std::make_shared<DemandingEvent>(gate_, number, std::move(event)));
  }

  Event Copy(void* to, const void* from, size_t bytes, const Event& after) override {
    if (char* view = device_->Find(to); view != nullptr) to = view;
    if (const char* view = device_->Find(from); view != nullptr) from = view;
    const std::vector<std::shared_ptr<void>> counted{device_->CountCopy(to),
                                                     device_->CountCopy(from)};
    return Enqueue([=]() -> absl::Status {
      if (absl::Status status = after.Wait(); !status.ok()) return status;
      if (bytes > 0) std::memcpy(to, from, bytes);
      return absl::OkStatus();
    });
  }

  absl::Status WaitFor(const Event& event) override {
    std::lock_guard lock(mutex_);
    return stream_->WaitFor(event);
  }

  Event Record() override {
    std::lock_guard lock(mutex_);
    return Event(std::make_shared<DemandingEvent>(gate_, gate_->enqueued(), stream_->Record()));
  }

 private:
  const GuardedDevice* const device_;
  const std::shared_ptr<Gate> gate_;
  std::mutex mutex_;  // numbers are in the stream's order
  std::unique_ptr<HostStream> stream_;
};

GuardedDevice::GuardedDevice(uint64_t seed)
    : seed_(seed),
      schedule_(static_cast<Schedule>(seed % 3)),
      accounting_(std::make_shared<cpu::AtomicAccounting>()),
      compute_(MakeStream("compute")) {}

GuardedDevice::~GuardedDevice() = default;

absl::StatusOr<Buffer> GuardedDevice::Allocate(size_t bytes, MemoryKind kind) {
  if (bytes == 0) return Buffer();
  absl::StatusOr<Buffer> view = cpu::AllocateUncounted(bytes);
  if (!view.ok()) return view;
  // One page more, so that the end of a buffer is not the begin of another.
  const auto page = static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  const auto reserved = static_cast<size_t>(RoundUp(static_cast<int64_t>(bytes), page) + page);
  void* device = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (device == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("guarded memory: no addresses for ", bytes,
                                                     " bytes of ", NameOf(kind), ": ",
                                                     strerror(errno)));
  }
  accounting_->Add(kind, static_cast<int64_t>(bytes));
  char* const begin = static_cast<char*>(device);
  auto shared = std::make_shared<Buffer>(*std::move(view));
  {
    std::lock_guard lock(mutex_);
    live_[begin] = {shared->as<char>(), bytes};
  }
  return Buffer(device, bytes, [this, begin, reserved, kind, shared = std::move(shared)] {
    accounting_->Remove(kind, static_cast<int64_t>(shared->bytes()));
    {
      std::lock_guard lock(mutex_);
      live_.erase(begin);
    }
    compute_->Enqueue([begin, reserved, shared] {
      std::memset(shared->data(), 0xDD, shared->bytes());
      munmap(begin, reserved);
      return absl::OkStatus();
    });
  });
}

absl::StatusOr<Buffer> GuardedDevice::AllocateHost(size_t bytes) {
  absl::StatusOr<Buffer> memory = cpu::AllocateUncounted(bytes);
  if (!memory.ok() || bytes == 0) return memory;
  char* const begin = memory->as<char>();
  {
    std::lock_guard lock(mutex_);
    host_[begin] = {bytes, std::make_shared<std::atomic<int>>(0)};
  }
  auto shared = std::make_shared<Buffer>(*std::move(memory));
  return Buffer(begin, bytes, [this, begin, shared] { ForgetHost(begin); });
}

std::shared_ptr<void> GuardedDevice::CountCopy(const void* host) const {
  const char* const address = static_cast<const char*>(host);
  std::lock_guard lock(mutex_);
  auto it = host_.upper_bound(address);
  if (it == host_.begin()) return nullptr;
  --it;
  if (address >= it->first + it->second.bytes) return nullptr;
  const auto copies = it->second.copies;
  ++*copies;
  return {static_cast<void*>(copies.get()), [copies](void*) { --*copies; }};
}

void GuardedDevice::ForgetHost(const char* begin) {
  std::lock_guard lock(mutex_);
  const auto it = host_.find(begin);
  if (*it->second.copies > 0) {
    std::fprintf(stderr, "guarded device: host memory is freed while %d copies use it\n",
                 it->second.copies->load());
    std::abort();
  }
  host_.erase(it);
}

std::unique_ptr<Stream> GuardedDevice::NewStream(const std::string& name) {
  return MakeStream(name);
}

std::unique_ptr<HostStream> GuardedDevice::MakeStream(const std::string& name) {
  std::lock_guard lock(mutex_);
  return std::make_unique<GuardedStream>(this, name, seed_ * 1000 + ++streams_);
}

char* GuardedDevice::Find(const void* device) const {
  const char* const address = static_cast<const char*>(device);
  std::lock_guard lock(mutex_);
  auto it = live_.upper_bound(address);
  if (it == live_.begin()) return nullptr;
  --it;
  const auto offset = static_cast<size_t>(address - it->first);
  return offset <= it->second.bytes ? it->second.view + offset : nullptr;
}

void* GuardedDevice::HostView(const void* device) const {
  if (device == nullptr) return nullptr;
  char* const view = Find(device);
  if (view == nullptr) {
    std::fprintf(stderr, "guarded device: %p is no memory of this device\n", device);
    std::abort();
  }
  return view;
}

}  // namespace zeroshard
