#include "worker/device/host_stream.h"

#include <pthread.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/device/host_event.h"

namespace zeroshard {
namespace {

absl::Status RunGuarded(const std::function<absl::Status()>& work, const std::string& where) {
  try {
    return work();
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat("work on stream '", where, "' threw: ", e.what()));
  } catch (...) {
    return absl::InternalError(
        absl::StrCat("work on stream '", where, "' threw no exception type"));
  }
}

absl::Status CopyAfter(void* to, const void* from, size_t bytes, const Event& after) {
  if (absl::Status status = after.Wait(); !status.ok()) return status;
  if (bytes > 0) std::memcpy(to, from, bytes);
  return absl::OkStatus();
}

class ThreadStream : public HostStream {
 public:
  explicit ThreadStream(std::string name) : name_(std::move(name)), thread_([this] { Loop(); }) {
    pthread_setname_np(thread_.native_handle(), name_.substr(0, 15).c_str());
  }

  ~ThreadStream() override {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  Event Enqueue(std::function<absl::Status()> work) override {
    return Push({.work = std::move(work)});
  }

  Event Copy(void* to, const void* from, size_t bytes, const Event& after) override {
    return Push({.work = [=]() -> absl::Status { return CopyAfter(to, from, bytes, after); }});
  }

  absl::Status WaitFor(const Event& event) override {
    if (event.Done()) return event.Wait();
    Push({.gate = event});
    return absl::OkStatus();
  }

  Event Record() override { return Push({.record = true}); }

 private:
  struct Item {
    std::function<absl::Status()> work = nullptr;
    Event gate = {};
    bool record = false;
    std::shared_ptr<HostEvent> done = nullptr;
  };

  Event Push(Item item) {
    item.done = std::make_shared<HostEvent>();
    Event event(item.done);
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(item));
    }
    changed_.notify_one();
    return event;
  }

  void Loop() {
    absl::Status since_record;  // the first error since the last Record
    for (;;) {
      Item item;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
        if (queue_.empty()) return;
        item = std::move(queue_.front());
        queue_.pop_front();
      }
      absl::Status status;
      if (item.work) {
        status = RunGuarded(item.work, name_);
        item.work = nullptr;  // what the closure owns is gone before anyone is told
        since_record.Update(status);
      } else if (item.record) {
        status = std::exchange(since_record, absl::OkStatus());
      } else {
        item.gate.Wait().IgnoreError();
      }
      item.done->Finish(std::move(status));
    }
  }

  const std::string name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  bool closing_ = false;
  std::thread thread_;  // last: it uses all of the above
};

class InlineStream : public Stream {
 public:
  Event Copy(void* to, const void* from, size_t bytes, const Event& after) override {
    absl::Status status = CopyAfter(to, from, bytes, after);
    if (status.ok()) return Event();
    {
      std::lock_guard lock(mutex_);
      since_record_.Update(status);
    }
    return DoneEvent(std::move(status));
  }

  absl::Status WaitFor(const Event& event) override { return event.Wait(); }

  Event Record() override {
    std::lock_guard lock(mutex_);
    return DoneEvent(std::exchange(since_record_, absl::OkStatus()));
  }

 private:
  std::mutex mutex_;
  absl::Status since_record_;
};

}  // namespace

std::unique_ptr<HostStream> MakeHostStream(const std::string& name) {
  return std::make_unique<ThreadStream>(name);
}

std::unique_ptr<Stream> MakeInlineStream() { return std::make_unique<InlineStream>(); }

}  // namespace zeroshard
