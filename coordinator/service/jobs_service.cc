#include "coordinator/service/jobs_service.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/grpc_status.h"
#include "common/plan/planner.h"
#include "common/spec/checks.h"
#include "common/spec/job_spec.h"
#include "common/version.h"
#include "coordinator/core/text.h"
#include "coordinator/service/checkpoints.h"
#include "coordinator/service/follower.h"
#include "coordinator/service/unary_call.h"

namespace zeroshard::coordinator {
namespace {

constexpr size_t kRecordsAtOnce = 500;
constexpr size_t kSamplesAtOnce = 50;
constexpr size_t kSampleBytesAtOnce = 1 << 20;  // of one update, and at most one sample more
constexpr size_t kLogBytesAtOnce = 64 << 10;

class WatchStream : public Follower<v1::WatchUpdate> {
 public:
  WatchStream(Engine* engine, const v1::JobStatus& status, const v1::WatchRequest& request)
      : Follower(engine),
        reader_(status.directory() + "/history.jsonl"),
        sample_reader_(status.directory() + "/samples.jsonl"),
        follow_(request.follow()),
        after_step_(request.after_step()) {}

 protected:
  Step Next(v1::WatchUpdate* update, grpc::Status* status) override {
    if (last_written_) return Step::kDone;
    absl::StatusOr<Engine::View> view = engine_->Look(run_id_);
    absl::StatusOr<std::vector<v1::StepRecord>> records = reader_.Next(kRecordsAtOnce);
    if (!view.ok() || !records.ok()) {
      *status = ToGrpcStatus(view.ok() ? records.status() : view.status());
      return Step::kDone;
    }
    for (v1::StepRecord& record : *records) {
      step_ = record.step();
      if (record.step() > after_step_) *update->add_records() = std::move(record);
    }
    // Steps are told in order and before the end that they led to.
    bool caught_up = records->size() < kRecordsAtOnce;
    if (absl::Status read = AddSamples(&caught_up, update); !read.ok()) {
      *status = ToGrpcStatus(read);
      return Step::kDone;
    }
    last_written_ = caught_up && (view->settled || !follow_);
    *update->mutable_status() = std::move(view->status);
    if (caught_up && !last_written_ && update->records_size() == 0 && update->samples_size() == 0 &&
        !Changed(update->status())) {
      return Step::kWait;
    }
    return Step::kWrite;
  }

 private:
  // Those of the steps that are told, or where the steps are all told, of any. `caught_up` becomes
  // false where there are more.
  absl::Status AddSamples(bool* caught_up, v1::WatchUpdate* update) {
    const bool all = *caught_up;
    for (size_t bytes = 0; bytes < kSampleBytesAtOnce;) {
      if (samples_.empty()) {
        absl::StatusOr<std::vector<v1::SampleRecord>> more = sample_reader_.Next(kSamplesAtOnce);
        if (!more.ok()) return more.status();
        if (more->empty()) return absl::OkStatus();
        samples_.assign(std::make_move_iterator(more->begin()),
                        std::make_move_iterator(more->end()));
      }
      v1::SampleRecord& next = samples_.front();
      if (!all && next.step() > step_) return absl::OkStatus();
      bytes += next.ByteSizeLong();
      if (next.step() > after_step_) *update->add_samples() = std::move(next);
      samples_.pop_front();
    }
    *caught_up = false;
    return absl::OkStatus();
  }

  bool Changed(const v1::JobStatus& status) {
    // Older events may have gone as a new one came.
    std::string now = absl::StrCat(status.state(), " ", status.events_size(), " ", status.reason());
    if (!status.events().empty()) {
      const v1::JobEvent& last = *status.events().rbegin();
      absl::StrAppend(&now, "\n", last.unix_ms(), " ", last.reason());
    }
    if (now == told_) return false;
    told_ = std::move(now);
    return true;
  }

  HistoryReader reader_;
  SampleReader sample_reader_;
  std::deque<v1::SampleRecord> samples_;  // read, not told
  const bool follow_;
  const uint64_t after_step_;
  uint64_t step_ = 0;  // the last that was read
  std::string told_;
  bool last_written_ = false;
};

class HistoryStream : public Follower<v1::StepRecord> {
 public:
  HistoryStream(Engine* engine, const v1::JobStatus& status)
      : Follower(engine), reader_(status.directory() + "/history.jsonl") {}

 protected:
  Step Next(v1::StepRecord* record, grpc::Status* status) override {
    if (next_ == records_.size()) {
      absl::StatusOr<std::vector<v1::StepRecord>> more = reader_.Next(kRecordsAtOnce);
      if (!more.ok() || more->empty()) {
        *status = ToGrpcStatus(more.status());
        return Step::kDone;
      }
      records_ = *std::move(more);
      next_ = 0;
    }
    *record = records_[next_++];
    return Step::kWrite;
  }

 private:
  HistoryReader reader_;
  std::vector<v1::StepRecord> records_;
  size_t next_ = 0;
};

class LogStream : public Follower<v1::LogChunk> {
 public:
  LogStream(Engine* engine, const v1::JobStatus& status, const v1::LogsRequest& request)
      : Follower(engine), request_(request), directory_(status.directory()) {}

 protected:
  Step Next(v1::LogChunk* chunk, grpc::Status* status) override {
    // Asked before the files are read: what is settled now is in them.
    const absl::StatusOr<Engine::View> view = engine_->Look(run_id_);
    if (!view.ok()) {
      *status = ToGrpcStatus(view.status());
      return Step::kDone;
    }
    // Ranks come with the first placement, and more of them with a later one.
    for (const v1::RankStatus& rank : view->status.ranks()) {
      if (request_.has_rank() && rank.rank() != request_.rank()) continue;
      readers_.try_emplace(rank.rank(),
                           directory_ + "/logs/rank-" + std::to_string(rank.rank()) + ".log");
    }
    for (auto& [rank, reader] : readers_) {
      absl::StatusOr<std::string> text = reader.Next(kLogBytesAtOnce);
      if (!text.ok()) {
        *status = ToGrpcStatus(text.status());
        return Step::kDone;
      }
      if (text->empty()) continue;
      chunk->set_rank(rank);
      chunk->set_text(*std::move(text));
      return Step::kWrite;
    }
    return view->settled || !request_.follow() ? Step::kDone : Step::kWait;
  }

 private:
  const v1::LogsRequest request_;
  const std::string directory_;
  std::map<uint32_t, LogReader> readers_;
};

// How long a call may wait for a file system: so that its message reaches the caller in time.
absl::Duration DiskPatience(const grpc::CallbackServerContext& context) {
  constexpr absl::Duration kMost = absl::Seconds(30);
  constexpr absl::Duration kLeast = absl::Milliseconds(100);
  const absl::Duration left = absl::FromChrono(context.deadline()) - absl::Now();
  return std::clamp(left * 0.9, kLeast, kMost);
}

grpc::ServerUnaryReactor* FinishNow(grpc::CallbackServerContext* context,
                                    const absl::Status& status = absl::OkStatus()) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

}  // namespace

grpc::ServerUnaryReactor* JobsService::Submit(grpc::CallbackServerContext* context,
                                              const v1::SubmitRequest* request,
                                              v1::SubmitResponse* response) {
  coordinator::Submit event{0, request->spec(), {}};
  if (absl::Status valid = NormaliseJobSpec(&event.spec); !valid.ok()) {
    return FinishNow(context, valid);
  }
  if (!request->resume_from().empty()) {
    absl::Status valid = CheckPath("resume_from", request->resume_from());
    if (!valid.ok()) return FinishNow(context, valid);
  }
  // Before its own checkpoints are taken for another's.
  const absl::StatusOr<Engine::View> other = engine_->Look(event.spec.name());
  if (other.ok() && other->status.name() == event.spec.name() && !IsEnded(other->status.state())) {
    return FinishNow(
        context, NameIsTaken(other->status.name(), other->status.state(), other->status.run_id()));
  }
  absl::StatusOr<std::vector<v1::ShardPlan>> plan = PlanShards(event.spec);
  if (!plan.ok()) return FinishNow(context, plan.status());
  event.plan = *std::move(plan);
  event.force = request->force();
  const auto fill = [this, response](const Reply& reply) {
    response->set_run_id(reply.text);
    absl::StatusOr<Engine::View> view = engine_->Look(reply.text);
    if (view.ok()) *response->mutable_status() = std::move(view->status);
  };
  if (event.spec.checkpoint().dir().empty() && request->resume_from().empty() &&
      !request->weights_only()) {
    return UnaryCall::Start(engine_, std::move(event), fill);
  }
  const auto shared = std::make_shared<coordinator::Submit>(std::move(event));
  const auto look = [shared, resume_from = request->resume_from(),
                     weights_only = request->weights_only()] {
    absl::StatusOr<std::optional<Checkpoint>> from =
        FindStart(shared->spec, resume_from, weights_only);
    if (from.ok()) shared->from = *std::move(from);
    return from.status();
  };
  return UnaryCall::StartAfter(
      engine_, &disk_, absl::StrCat("job ", shared->spec.name()), DiskPatience(*context), look,
      [shared, fill](UnaryCall* call) { call->Send(std::move(*shared), fill); });
}

grpc::ServerUnaryReactor* JobsService::Checkpoints(grpc::CallbackServerContext* context,
                                                   const v1::CheckpointsRequest* request,
                                                   v1::CheckpointsResponse* response) {
  const absl::StatusOr<Engine::View> view = engine_->Look(request->job());
  if (!view.ok()) return FinishNow(context, view.status());
  const std::string dir = view->checkpoint_dir;
  if (dir.empty()) {
    return FinishNow(context, absl::FailedPreconditionError(absl::StrCat(
                                  "job ", view->status.name(), " (run ", view->status.run_id(),
                                  ") has no checkpoint section: it saves nothing")));
  }
  const auto found = std::make_shared<v1::CheckpointsResponse>();
  const auto look = [dir, found] {
    absl::StatusOr<v1::CheckpointsResponse> described = DescribeCheckpoints(dir);
    if (described.ok()) *found = *std::move(described);
    return described.status();
  };
  return UnaryCall::StartAfter(engine_, &disk_, dir, DiskPatience(*context), look,
                               [found, response](UnaryCall* call) {
                                 *response = std::move(*found);
                                 call->Answer(absl::OkStatus());
                               });
}

grpc::ServerUnaryReactor* JobsService::List(grpc::CallbackServerContext* context,
                                            const v1::ListRequest* request,
                                            v1::ListResponse* response) {
  for (v1::JobStatus& job : engine_->List()) *response->add_jobs() = std::move(job);
  return FinishNow(context);
}

grpc::ServerUnaryReactor* JobsService::Get(grpc::CallbackServerContext* context,
                                           const v1::GetRequest* request, v1::JobStatus* response) {
  absl::StatusOr<Engine::View> view = engine_->Look(request->job());
  if (view.ok()) *response = std::move(view->status);
  return FinishNow(context, view.status());
}

grpc::ServerUnaryReactor* JobsService::Cancel(grpc::CallbackServerContext* context,
                                              const v1::CancelRequest* request,
                                              v1::JobStatus* response) {
  return UnaryCall::Start(engine_, coordinator::Cancel{0, request->job(), request->save()},
                          [this, response](const Reply& reply) {
                            absl::StatusOr<Engine::View> view = engine_->Look(reply.text);
                            if (view.ok()) *response = std::move(view->status);
                          });
}

grpc::ServerWriteReactor<v1::WatchUpdate>* JobsService::Watch(grpc::CallbackServerContext* context,
                                                              const v1::WatchRequest* request) {
  const absl::StatusOr<Engine::View> view = engine_->Look(request->job());
  const v1::JobStatus status = view.ok() ? view->status : v1::JobStatus();
  return WatchStream::Start(std::make_shared<WatchStream>(engine_, status, *request),
                            status.run_id(), ToGrpcStatus(view.status()));
}

grpc::ServerWriteReactor<v1::StepRecord>* JobsService::History(grpc::CallbackServerContext* context,
                                                               const v1::HistoryRequest* request) {
  const absl::StatusOr<Engine::View> view = engine_->Look(request->job());
  const v1::JobStatus status = view.ok() ? view->status : v1::JobStatus();
  return HistoryStream::Start(std::make_shared<HistoryStream>(engine_, status), status.run_id(),
                              ToGrpcStatus(view.status()));
}

grpc::ServerWriteReactor<v1::LogChunk>* JobsService::Logs(grpc::CallbackServerContext* context,
                                                          const v1::LogsRequest* request) {
  const absl::StatusOr<Engine::View> view = engine_->Look(request->job());
  const v1::JobStatus status = view.ok() ? view->status : v1::JobStatus();
  return LogStream::Start(std::make_shared<LogStream>(engine_, status, *request), status.run_id(),
                          ToGrpcStatus(view.status()));
}

grpc::ServerUnaryReactor* JobsService::Nodes(grpc::CallbackServerContext* context,
                                             const v1::NodesRequest* request,
                                             v1::NodesResponse* response) {
  *response = engine_->Nodes();
  return FinishNow(context);
}

grpc::ServerUnaryReactor* JobsService::Version(grpc::CallbackServerContext* context,
                                               const v1::VersionRequest* request,
                                               v1::VersionResponse* response) {
  response->set_version(kVersion);
  return FinishNow(context);
}

}  // namespace zeroshard::coordinator
