// Drives coordinator::Core as the service does: records first, then actions, with a process that
// can end between any two of them. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "coordinator/core/core.h"
#include "tests/coordinator/core/memory_log.h"
#include "tests/simulator/world.h"

namespace zeroshard::simulator {

class Cluster;

class SimCoordinator {
 public:
  explicit SimCoordinator(Cluster* cluster);

  void Start();
  void Handle(const coordinator::Event& event);
  bool up() const { return core_ != nullptr; }
  uint64_t boot() const { return boot_; }
  const coordinator::Core& core() const { return *core_; }

  // --- faults ---
  // The process ends in the `events`-th event from now: before or after the log has it, or after
  // some of its actions.
  void CrashIn(uint64_t events) { crash_in_ = events; }
  void Pause(absl::Duration how_long);

 private:
  void Execute(const coordinator::Decision& decision);
  void Act(const coordinator::Action& action);
  void Crash(const std::string& when);
  void Wake();
  // An event of the disk's thread, which ends with the process.
  void Later(absl::Duration delay, coordinator::Event event);

  void On(const coordinator::SendToSession& action);
  void On(const coordinator::CloseSession& action);
  void On(const coordinator::Reply& action);
  void On(const coordinator::AppendHistory& action);
  void On(const coordinator::TruncateHistory& action);
  void On(const coordinator::FindNewest& action);
  void On(const coordinator::OpenSnapshots& action);
  void On(const coordinator::BeginSnapshot& action);
  void On(const coordinator::CompleteSnapshot& action);
  void On(const coordinator::AbandonSnapshot& action);
  template <typename Other>
  void On(const Other&) {}

  Cluster* const cluster_;
  const coordinator::CoreOptions options_;
  coordinator::MemoryLog log_;
  std::unique_ptr<coordinator::Core> core_;
  uint64_t boot_ = 0;
  uint64_t crash_in_ = 0;
  absl::Duration paused_until_ = absl::ZeroDuration();
  absl::Duration wake_ = absl::InfiniteDuration();
  std::map<std::string, std::string> folders_;  // by run: what the stores write into now
  uint64_t last_folder_ = 0;
};

}  // namespace zeroshard::simulator
