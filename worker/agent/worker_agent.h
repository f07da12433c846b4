// The worker: serves the jobs that the coordinator assigns, one after another.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "common/member/member_session.h"
#include "worker/agent/job_run.h"

namespace zeroshard {

// Thread-safe. Holds no memory for training between jobs.
class WorkerAgent : public MemberHandler {
 public:
  // `backend` and `metrics` outlive the agent. The session connects to options.coordinator at once.
  WorkerAgent(MemberSessionOptions options, const WorkerBackend* backend, WorkerMetrics* metrics);
  // Stops the job that runs, if any, and waits for it.
  ~WorkerAgent() override;

  // Ends the job that runs and takes no further one. A job that has a checkpoint section, and
  // trains, first writes a checkpoint on all its ranks, where that takes no longer than `grace`.
  // Then it is stopped. False if it has not ended within `timeout` of that: then only the end of
  // the process will end it.
  bool Shutdown(const std::string& reason, absl::Duration grace, absl::Duration timeout);

  MemberSession* session() { return session_.get(); }

  void OnAssign(const v1::Assign& assign) override;
  void OnStop(const v1::Stop& stop) override;
  void OnFenced(const std::string& reason) override;
  bool Running(v1::Fence* fence, v1::Progress* progress) override;

 private:
  void Main();

  const std::string name_;
  const WorkerBackend* const backend_;
  WorkerMetrics* const metrics_;
  const std::string host_;
  ClusterClient client_;
  std::unique_ptr<MemberSession> session_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<v1::Assign> next_;
  std::shared_ptr<JobRun> current_;
  std::string leaving_;  // why no job is taken any more
  bool ended_ = false;   // the thread has nothing more to do
  std::thread thread_;
};

}  // namespace zeroshard
