#include "shard_store/store_agent.h"

#include <vector>

#include "common/log.h"

namespace zeroshard::store {

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
