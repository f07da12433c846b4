#include "common/http_connections.h"

#include <sys/socket.h>

namespace zeroshard {
namespace {

constexpr std::chrono::milliseconds kLook(100);

}  // namespace

HttpConnections::HttpConnections() : thread_([this] { Main(); }) {}

HttpConnections::~HttpConnections() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  closing_changed_.notify_all();
  thread_.join();
}

void HttpConnections::Expect(int socket, std::chrono::milliseconds within) {
  std::lock_guard<std::mutex> lock(mutex_);
  due_[socket] = Clock::now() + within;
}

void HttpConnections::Release(int socket) {
  std::lock_guard<std::mutex> lock(mutex_);
  due_[socket] = Clock::time_point::max();
}

void HttpConnections::Remove(int socket) {
  std::lock_guard<std::mutex> lock(mutex_);
  due_.erase(socket);
}

void HttpConnections::Main() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closing_changed_.wait_for(lock, kLook, [this] { return closing_; })) {
    const Clock::time_point now = Clock::now();
    for (auto& [socket, due] : due_) {
      if (now < due) continue;
      // Under the lock: after Remove the number may be another socket's.
      shutdown(socket, SHUT_RDWR);
      due = Clock::time_point::max();
    }
  }
}

}  // namespace zeroshard
