#include "worker/agent/worker_agent.h"

#include <malloc.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"

namespace zeroshard {
namespace {

bool IsRun(const v1::Fence& fence, const std::string& run_id, uint64_t generation) {
  return fence.run_id() == run_id && fence.generation() == generation;
}

}  // namespace

WorkerAgent::WorkerAgent(MemberSessionOptions options, const WorkerBackend* backend,
                         WorkerMetrics* metrics)
    : name_(options.hello.name()),
      backend_(backend),
      metrics_(metrics),
      host_(options.hello.host()),
      client_(options.coordinator) {
  session_ = std::make_unique<MemberSession>(std::move(options), this);
  thread_ = std::thread([this] { Main(); });
}

WorkerAgent::~WorkerAgent() {
  Shutdown("the worker ends", absl::ZeroDuration(), absl::InfiniteDuration());
  session_.reset();  // no callback after this
  thread_.join();
}

bool WorkerAgent::Shutdown(const std::string& reason, absl::Duration grace,
                           absl::Duration timeout) {
  const auto bounded = [](absl::Duration wait) {
    return absl::ToChronoNanoseconds(std::min(wait, absl::Hours(24 * 365)));
  };
  std::unique_lock<std::mutex> lock(mutex_);
  if (leaving_.empty()) leaving_ = reason;
  next_.reset();
  const std::shared_ptr<JobRun> run = current_;
  changed_.notify_all();
  lock.unlock();
  if (run != nullptr && run->Leave(reason, grace > absl::ZeroDuration())) {
    LogInfo("the job writes a checkpoint first, for at most ", absl::FormatDuration(grace));
    session_->Poke();
    lock.lock();
    if (changed_.wait_for(lock, bounded(grace), [this] { return ended_; })) return true;
    lock.unlock();
    run->Stop(absl::StrCat(run->saved() ? "the coordinator did not answer within "
                                        : "no checkpoint was complete within ",
                           absl::FormatDuration(grace)));
  } else if (run != nullptr) {
    run->Stop(reason);
  }
  lock.lock();
  return changed_.wait_for(lock, bounded(timeout), [this] { return ended_; });
}

void WorkerAgent::OnAssign(const v1::Assign& assign) {
  std::shared_ptr<JobRun> other;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!leaving_.empty()) return;
    // Said again after a lost connection.
    if (current_ != nullptr && IsRun(current_->fence(), assign.run_id(), assign.generation())) {
      return;
    }
    next_ = assign;
    other = current_;
    changed_.notify_all();
  }
  // In the coordinator's eyes it is over, or it has just said so and waits for the answer.
  if (other != nullptr) {
    other->Stop(absl::StrCat("assigned to run ", assign.run_id()), /*silent=*/true);
  }
}

void WorkerAgent::OnStop(const v1::Stop& stop) {
  std::shared_ptr<JobRun> run;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stop.save() && next_.has_value() && next_->run_id() == stop.run_id() &&
        next_->generation() <= stop.generation()) {
      next_.reset();
    }
    if (current_ != nullptr && current_->fence().run_id() == stop.run_id() &&
        current_->fence().generation() <= stop.generation()) {
      run = current_;
    }
  }
  if (run == nullptr) return;
  // The state of an offloaded job is where it can be saved without its ranks.
  if (stop.save() && (run->SaveAndStop() || !run->offloaded())) return;
  run->Stop(stop.reason());
}

void WorkerAgent::OnFenced(const std::string& reason) {
  std::shared_ptr<JobRun> run;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    next_.reset();
    run = current_;
  }
  if (run != nullptr) run->Stop(reason);
}

bool WorkerAgent::Running(v1::Fence* fence, v1::Progress* progress) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (current_ == nullptr) return false;
  *fence = current_->fence();
  *progress = current_->progress();
  return true;
}

void WorkerAgent::Main() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return next_.has_value() || !leaving_.empty(); });
    if (!leaving_.empty()) break;
    v1::Fence fence;
    fence.set_member(name_);
    fence.set_incarnation(session_->incarnation());
    fence.set_run_id(next_->run_id());
    fence.set_generation(next_->generation());
    fence.set_rank(next_->rank());
    JobRunContext context;
    context.backend = backend_;
    context.client = &client_;
    context.metrics = metrics_;
    context.presence = session_->presence();
    context.host = host_;
    auto run = std::make_shared<JobRun>(context, *std::move(next_), fence);
    next_.reset();
    current_ = run;
    lock.unlock();

    session_->log_queue()->SetRun(std::make_shared<const v1::Fence>(fence));
    session_->Poke();
    run->Run();
    session_->log_queue()->SetRun(nullptr);
    malloc_trim(0);

    lock.lock();
    current_.reset();
    changed_.notify_all();
    lock.unlock();
    session_->Poke();
    lock.lock();
  }
  ended_ = true;
  changed_.notify_all();
}

}  // namespace zeroshard
