// The store as a member of a cluster: directives in, reports out.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "common/member/member_session.h"
#include "shard_store/state/store_host.h"

namespace zeroshard::store {

// Thread-safe. What the host reports before there are a host and a session to speak of is not lost:
// everything is said again after each welcome.
class StoreAgent : public MemberHandler {
 public:
  // Both outlive the agent's use of them; null: no more.
  void SetHost(StoreHost* host);
  void SetSession(MemberSession* session);

  // StoreHostOptions.on_report. Reports of one job come in the order in which it changed.
  void OnReport(const v1::StoreReport& report);

  void OnStore(const v1::StoreDirective& directive) override;
  void OnWelcome() override;
  void OnFenced(const std::string& reason) override;

 private:
  std::mutex mutex_;
  StoreHost* host_ = nullptr;
  MemberSession* session_ = nullptr;
  std::map<std::string, uint64_t> reported_;  // by run: how often OnReport was called
};

}  // namespace zeroshard::store
