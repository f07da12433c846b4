// The store as a member of a cluster: directives in, reports out.
#pragma once

#include <condition_variable>
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

  // StoreHostOptions.incarnation: the session's; empty where there is none yet.
  std::string incarnation();
  // StoreHostOptions.on_report. Reports of one job come in the order in which it changed.
  void OnReport(const v1::StoreReport& report);

  // Says in every heartbeat that this store was asked to leave, and waits until the coordinator
  // lets it go: what jobs have here alone is saved then. At most `grace`; not where nothing is
  // held; and at most `away` without a coordinator, in which one that only starts again is back.
  // True: nothing is lost by leaving.
  bool AwaitLeave(absl::Duration grace, absl::Duration away = absl::Seconds(5));

  void OnStore(const v1::StoreDirective& directive) override;
  void OnStop(const v1::Stop& stop) override;
  bool Running(v1::Fence* fence, v1::Progress* progress) override;
  void OnWelcome() override;
  void OnFenced(const std::string& reason) override;

 private:
  std::mutex mutex_;
  StoreHost* host_ = nullptr;
  MemberSession* session_ = nullptr;
  std::map<std::string, uint64_t> reported_;  // by run: how often OnReport was called
  bool leaving_ = false;
  bool may_go_ = false;
  std::condition_variable let_go_;
};

}  // namespace zeroshard::store
