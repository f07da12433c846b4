#include "shard_store/store_agent.h"

#include <chrono>
#include <utility>
#include <vector>

#include "common/log.h"

namespace zeroshard::store {
namespace {

// The phase that the coordinator knows (coordinator/core/run.h).
constexpr char kLeavingPhase[] = "leaving";
constexpr std::chrono::milliseconds kLook(50);

}  // namespace

void StoreAgent::SetHost(StoreHost* host) {
  std::lock_guard<std::mutex> lock(mutex_);
  host_ = host;
}

void StoreAgent::SetSession(MemberSession* session) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    session_ = session;
  }
  if (session != nullptr) OnWelcome();  // it may have been welcomed before it was known here
}

void StoreAgent::OnReport(const v1::StoreReport& report) {
  // Under the lock, so that OnWelcome cannot put an older one after it. SendReport only queues.
  std::lock_guard<std::mutex> lock(mutex_);
  if (report.dropped()) {
    reported_.erase(report.run_id());
  } else {
    ++reported_[report.run_id()];
  }
  if (session_ != nullptr) session_->SendReport(report);
}

std::string StoreAgent::incarnation() {
  MemberSession* session = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    session = session_;
  }
  return session == nullptr ? "" : session->incarnation();
}

bool StoreAgent::AwaitLeave(absl::Duration grace, absl::Duration away) {
  using Steady = std::chrono::steady_clock;
  std::unique_lock<std::mutex> lock(mutex_);
  StoreHost* const host = host_;
  MemberSession* const session = session_;
  if (host == nullptr || session == nullptr) return true;
  leaving_ = true;
  const Steady::time_point start = Steady::now();
  Steady::time_point heard = start;
  bool poked = false;
  while (!may_go_) {
    lock.unlock();
    if (host->jobs() == 0) return true;
    const Steady::time_point now = Steady::now();
    if (session->connected()) {
      if (!std::exchange(poked, true)) session->Poke();
      heard = now;
    }
    const absl::Duration waited = absl::FromChrono(now - start);
    if (waited >= grace || absl::FromChrono(now - heard) >= away) {
      LogWarning("leaving after ", absl::FormatDuration(waited),
                 waited >= grace ? ": the coordinator has not said that what jobs have here alone "
                                   "is saved (--shutdown-grace)"
                                 : ": no coordinator is there to say whether what jobs have here "
                                   "is saved");
      return false;
    }
    lock.lock();
    let_go_.wait_for(lock, kLook, [this] { return may_go_; });
  }
  return true;
}

void StoreAgent::OnStop(const v1::Stop& stop) {
  if (!stop.run_id().empty()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!leaving_) return;
  may_go_ = true;
  let_go_.notify_all();
}

bool StoreAgent::Running(v1::Fence*, v1::Progress* progress) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (leaving_) progress->set_phase(kLeavingPhase);
  return false;
}

void StoreAgent::OnStore(const v1::StoreDirective& directive) {
  StoreHost* host;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    host = host_;
  }
  if (host != nullptr) host->OnDirective(directive);
}

void StoreAgent::OnWelcome() {
  StoreHost* host;
  std::map<std::string, uint64_t> before;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    host = host_;
    before = reported_;
  }
  if (host == nullptr) return;
  const std::vector<v1::StoreReport> reports = host->Reports();
  std::lock_guard<std::mutex> lock(mutex_);
  if (session_ == nullptr) return;
  for (const v1::StoreReport& report : reports) {
    // What has been reported meanwhile is newer.
    if (reported_[report.run_id()] == before[report.run_id()]) session_->SendReport(report);
  }
}

void StoreAgent::OnFenced(const std::string& reason) {
  StoreHost* host;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    host = host_;
    reported_.clear();
  }
  LogWarning("fenced (", reason, "): what is held for jobs is dropped");
  if (host != nullptr) host->Clear();
}

}  // namespace zeroshard::store
