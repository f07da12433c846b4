// Which of the things that could be logged over and over were logged before. Thread-safe.
#pragma once

#include <cstddef>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace zeroshard::store {

class SaidOnce {
 public:
  explicit SaidOnce(size_t most = 1024) : most_(most) {}

  // True the first time. After `most` different ones it begins anew.
  bool First(const std::string& peer, const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (said_.contains({peer, reason})) return false;
    if (said_.size() >= most_) said_.clear();
    said_.emplace(peer, reason);
    return true;
  }

 private:
  const size_t most_;
  std::mutex mutex_;
  std::set<std::pair<std::string, std::string>> said_;
};

}  // namespace zeroshard::store
