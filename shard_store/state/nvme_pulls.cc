#include "shard_store/state/nvme_pulls.h"

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace zeroshard::store {
namespace {

constexpr int kThreads = 2;

}  // namespace

NvmePulls::NvmePulls(std::vector<std::shared_ptr<Buffer>> buffers, absl::Duration patience)
    : patience_(patience), room_(std::make_shared<Room>()) {
  room_->free = std::move(buffers);
}

absl::StatusOr<std::unique_ptr<NvmePulls>> NvmePulls::Make(
    std::vector<std::shared_ptr<Buffer>> buffers, absl::Duration patience,
    const ThreadStarter& start_thread) {
  std::unique_ptr<NvmePulls> pulls(new NvmePulls(std::move(buffers), patience));
  pulls->threads_.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    std::thread thread;
    ZS_RETURN_IF_ERROR(StartThread(
        start_thread, [pulls = pulls.get()] { pulls->Main(); }, &thread));
    pulls->threads_.push_back(std::move(thread));
  }
  return pulls;
}

void NvmePulls::End() {
  std::deque<Task> tasks;
  std::vector<std::shared_ptr<Buffer>> buffers;
  {
    std::lock_guard<std::mutex> lock(room_->mutex);
    room_->ending = true;
    tasks.swap(room_->tasks);
    buffers.swap(room_->free);
    room_->changed.notify_all();
  }
  for (Task& task : tasks) task.done(absl::CancelledError("the state here is no longer kept"));
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void NvmePulls::Add(size_t bytes, Read read, Done done) {
  {
    std::lock_guard<std::mutex> lock(room_->mutex);
    if (!room_->ending) {
      room_->tasks.push_back({bytes, std::move(read), std::move(done)});
      room_->changed.notify_all();
      return;
    }
  }
  done(absl::CancelledError("the state here is no longer kept"));
}

void NvmePulls::Main() {
  while (true) {
    std::unique_lock<std::mutex> lock(room_->mutex);
    room_->changed.wait(lock, [this] { return room_->ending || !room_->tasks.empty(); });
    if (room_->tasks.empty()) return;
    Task task = std::move(room_->tasks.front());
    room_->tasks.pop_front();
    lock.unlock();
    Serve(std::move(task));
  }
}

void NvmePulls::Serve(Task task) {
  std::shared_ptr<Buffer> buffer;
  bool ending = false;
  {
    std::unique_lock<std::mutex> lock(room_->mutex);
    room_->changed.wait_for(lock, absl::ToChronoNanoseconds(patience_),
                            [this] { return room_->ending || !room_->free.empty(); });
    ending = room_->ending;
    if (!ending && !room_->free.empty()) {
      buffer = std::move(room_->free.back());
      room_->free.pop_back();
    }
  }
  if (ending) return task.done(absl::CancelledError("the state here is no longer kept"));
  if (buffer == nullptr) {
    return task.done(absl::CancelledError(absl::StrCat(
        "no buffer for parameters from the disk came free within ", absl::FormatDuration(patience_),
        ": workers do not read what they asked for; look at them and at the network")));
  }
  // Back to the others when the last who looks at it lets go.
  const std::shared_ptr<const void> pin(buffer->data(),
                                        [room = room_, buffer](const void*) mutable {
                                          std::lock_guard<std::mutex> lock(room->mutex);
                                          if (room->ending) return;  // the buffer goes with this
                                          room->free.push_back(std::move(buffer));
                                          room->changed.notify_all();
                                        });
  absl::Status status;
  try {
    status = task.bytes <= buffer->size()
                 ? task.read(buffer->data())
                 : absl::InternalError(absl::StrCat(task.bytes,
                                                    " bytes of parameters for a buffer "
                                                    "of ",
                                                    buffer->size()));
  } catch (const std::exception& error) {
    status = absl::InternalError(absl::StrCat("unexpected exception: ", error.what()));
  }
  const char* data = buffer->data();
  buffer = nullptr;
  if (!status.ok()) return task.done(status);
  task.done(PinnedParameters{pin, absl::MakeConstSpan(data, task.bytes)});
}

}  // namespace zeroshard::store
