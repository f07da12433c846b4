#include "worker/comm/gloo_communicator.h"

#include <chrono>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_payloads.h"
#include "worker/comm/arguments.h"

namespace zeroshard {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

GlooCommunicator::GlooCommunicator(const CommunicatorOptions& options, const GlooTuning& tuning,
                                   std::unique_ptr<Mesh> mesh, Device* device)
    : rank_(options.rank),
      size_(options.size),
      line_(options.line),
      job_ranks_(options.job_ranks),
      operation_timeout_(options.operation_timeout),
      tuning_(tuning),
      device_(device),
      mesh_(std::move(mesh)),
      sent_to_(options.size),
      received_from_(options.size),
      stream_(MakeHostStream("comm")) {}

GlooCommunicator::~GlooCommunicator() {
  const absl::Status gone = absl::AbortedError("the communicator is being destroyed");
  {
    absl::MutexLock lock(&mutex_);
    if (failed_.ok()) failed_ = gone;
  }
  if (mesh_ != nullptr) mesh_->Interrupt(gone);
  stream_ = nullptr;
  lanes_.clear();
  mesh_ = nullptr;
}

Event GlooCommunicator::AllGather(void* buffer, int64_t count, DType type,
                                  const CollectiveInfo& info, const Event& after) {
  return Enqueue(NameOf(CollectiveOp::kAllGather), info, after, [=, this, phase = info.phase] {
    return RunAllGather(buffer, count, type, phase);
  });
}

Event GlooCommunicator::ReduceScatter(ReduceScatterArgs args, const CollectiveInfo& info,
                                      const Event& after) {
  return Enqueue(
      NameOf(CollectiveOp::kReduceScatter), info, after,
      [this, args = std::move(args), phase = info.phase] { return RunReduceScatter(args, phase); });
}

Event GlooCommunicator::AllReduce(void* buffer, int64_t count, DType type,
                                  const CollectiveInfo& info, const Event& after) {
  return Enqueue(NameOf(CollectiveOp::kAllReduce), info, after, [=, this, phase = info.phase] {
    return RunAllReduce(buffer, count, type, phase);
  });
}

Event GlooCommunicator::Broadcast(void* buffer, int64_t bytes, int root, const CollectiveInfo& info,
                                  const Event& after) {
  return Enqueue(NameOf(CollectiveOp::kBroadcast), info, after, [=, this, phase = info.phase] {
    return RunBroadcast(buffer, bytes, root, phase);
  });
}

Event GlooCommunicator::Send(const void* buffer, int64_t bytes, int peer,
                             const CollectiveInfo& info, const Event& after) {
  return Enqueue(NameOf(CollectiveOp::kSend), info, after,
                 [=, this, phase = info.phase] { return RunSend(buffer, bytes, peer, phase); });
}

Event GlooCommunicator::Recv(void* buffer, int64_t bytes, int peer, const CollectiveInfo& info,
                             const Event& after) {
  return Enqueue("recv", info, after, [=, this] { return RunRecv(buffer, bytes, peer); });
}

Event GlooCommunicator::Exchange(std::vector<Message> messages, const CollectiveInfo& info,
                                 const Event& after) {
  return Enqueue("exchange", info, after,
                 [this, messages = std::move(messages)] { return RunExchange(messages); });
}

Event GlooCommunicator::Barrier(const CollectiveInfo& info) {
  return Enqueue("barrier", info, {}, [this] { return RunBarrier(); });
}

absl::Status GlooCommunicator::AllGatherHost(void* buffer, int64_t bytes,
                                             const CollectiveInfo& info) {
  return AllGather(buffer, bytes, DType::kU8, info, {}).Wait();
}

Event GlooCommunicator::Enqueue(const char* name, const CollectiveInfo& info, const Event& after,
                                std::function<absl::Status()> body) {
  std::string what = OperationName(name, info, rank_, size_);
  if (!line_.empty()) what = absl::StrCat(line_, ": ", what);
  absl::MutexLock lock(&enqueue_mutex_);
  return stream_->Enqueue([this, what = std::move(what), after, body = std::move(body)] {
    return Run(what, after, body);
  });
}

absl::Status GlooCommunicator::Run(const std::string& what, const Event& after,
                                   const std::function<absl::Status()>& body) {
  {
    absl::MutexLock lock(&mutex_);
    if (!failed_.ok()) return Refusal(what);
  }
  absl::Status status = after.Wait();
  if (!status.ok()) {
    return Fail(what, Prefixed("the work before it failed", status));
  }
  const Clock::time_point start = Clock::now();
  if (mesh_ != nullptr) mesh_->Begin(operation_timeout_);
  try {
    status = body();
  } catch (const std::exception& e) {
    status = absl::InternalError(e.what());
  }
  if (mesh_ != nullptr) mesh_->End();
  busy_nanos_ += std::chrono::nanoseconds(Clock::now() - start).count();
  return status.ok() ? status : Fail(what, status);
}

absl::Status GlooCommunicator::Refusal(const std::string& what) {
  return Prefixed(absl::StrCat(what, ": not started, the communicator failed before"), failed_);
}

absl::Status GlooCommunicator::Fail(const std::string& what, const absl::Status& status) {
  absl::Status named = Prefixed(what, status);
  if (mesh_ != nullptr && mesh_->blamed() >= 0 && !BlamedRank(named).has_value()) {
    const auto blamed = static_cast<size_t>(mesh_->blamed());
    SetBlamedRank(
        static_cast<uint32_t>(blamed < job_ranks_.size() ? job_ranks_[blamed] : mesh_->blamed()),
        &named);
  }
  {
    absl::MutexLock lock(&mutex_);
    if (failed_.ok()) failed_ = named;
  }
  TearDown();
  return named;
}

void GlooCommunicator::TearDown() {
  lanes_.clear();
  absl::Status why;
  {
    absl::MutexLock lock(&mutex_);
    why = failed_;
  }
  if (mesh_ != nullptr) mesh_->Close(why);
}

void GlooCommunicator::Abort(const std::string& reason) {
  const absl::Status status = absl::AbortedError(absl::StrCat("aborted: ", reason));
  {
    absl::MutexLock lock(&mutex_);
    if (!failed_.ok()) return;
    failed_ = status;
  }
  if (mesh_ != nullptr) mesh_->Interrupt(status);
  // The peers are told even where no operation is under way.
  absl::MutexLock lock(&enqueue_mutex_);
  stream_->Enqueue([this] {
    TearDown();
    return absl::OkStatus();
  });
}

absl::StatusOr<std::unique_ptr<Communicator>> MakeGlooCommunicator(
    const CommunicatorOptions& options, const GlooTuning& tuning, Rendezvous* rendezvous,
    Device* device) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", options.rank, " of ", options.size, " ranks does not exist"));
  }
  std::unique_ptr<Mesh> mesh;
  if (options.size > 1) {
    if (rendezvous == nullptr) {
      return absl::InvalidArgumentError("more than one rank, and no rendezvous to meet at");
    }
    try {
      absl::StatusOr<std::unique_ptr<Mesh>> connected = Mesh::Connect(options, rendezvous);
      if (!connected.ok()) return connected.status();
      mesh = *std::move(connected);
    } catch (const std::exception& e) {
      return absl::UnavailableError(
          absl::StrCat("rank ", options.rank, " could not join the collectives: ", e.what()));
    }
  }
  return std::make_unique<GlooCommunicator>(options, tuning, std::move(mesh), device);
}

absl::StatusOr<std::unique_ptr<Communicator>> MakeGlooCommunicator(
    const CommunicatorOptions& options, Rendezvous* rendezvous, Device* device) {
  return MakeGlooCommunicator(options, GlooTuning{}, rendezvous, device);
}

}  // namespace zeroshard
