#include "common/member/log_queue.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

constexpr size_t kMessageBytes = 64 << 10;
constexpr size_t kLineBytes = 4 << 10;  // what is kept of one line

}  // namespace

void LogQueue::SetRun(std::shared_ptr<const v1::Fence> run) {
  std::lock_guard<std::mutex> lock(mutex_);
  run_ = std::move(run);
}

void LogQueue::Add(const std::string& line) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (run_ == nullptr) return;
  // Once something was dropped, nothing is kept before the notice is out: the order stays true.
  if (dropped_ > 0 || bytes_ + line.size() > most_bytes_) {
    ++dropped_;
    dropped_of_ = run_;
    return;
  }
  lines_.push_back({run_, line.substr(0, kLineBytes)});
  bytes_ += lines_.back().text.size();
}

std::optional<v1::LogLines> LogQueue::Take() {
  std::lock_guard<std::mutex> lock(mutex_);
  v1::LogLines message;
  if (lines_.empty()) {
    if (dropped_ == 0) return std::nullopt;
    *message.mutable_running() = *dropped_of_;
    message.add_lines(absl::StrCat("(", dropped_,
                                   " lines dropped here: the coordinator was away; they are in "
                                   "this process's own log)"));
    dropped_ = 0;
    dropped_of_.reset();
    return message;
  }
  const std::shared_ptr<const v1::Fence> run = lines_.front().run;
  *message.mutable_running() = *run;
  size_t taken = 0;
  while (!lines_.empty() && lines_.front().run == run && taken < kMessageBytes) {
    const size_t size = lines_.front().text.size();
    taken += size;
    bytes_ -= size;
    message.add_lines(std::move(lines_.front().text));
    lines_.pop_front();
  }
  return message;
}

}  // namespace zeroshard
