#include "worker/comm/nccl/nccl_communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "worker/comm/arguments.h"
#include "worker/comm/nccl/nccl_connect.h"
#include "worker/comm/traffic.h"

namespace zeroshard {

NcclCommunicator::NcclCommunicator(const CommunicatorOptions& options, const NcclTuning& tuning,
                                   std::shared_ptr<NcclApi> api, NcclComm* comm, NcclStream* stream,
                                   Device* device)
    : rank_(options.rank),
      size_(options.size),
      deterministic_(options.deterministic),
      line_(options.line),
      tuning_(tuning),
      api_(std::move(api)),
      device_(device),
      queue_(std::make_unique<NcclQueue>(
          api_, comm, stream,
          NcclQueueOptions{.who = absl::StrCat(options.line, options.line.empty() ? "" : ": ",
                                               "rank ", options.rank, " of ", options.size),
                           .operation_timeout = options.operation_timeout,
                           .presence = options.presence,
                           .ending = tuning.ending,
                           .order = tuning.order != nullptr ? tuning.order
                                                            : std::make_shared<LaunchOrder>()})) {}

Event NcclCommunicator::Enqueue(const char* name, const CollectiveInfo& info, const Event& after,
                                std::function<absl::Status()> body,
                                std::function<void()> succeeded) {
  std::string what = OperationName(name, info, rank_, size_);
  if (!line_.empty()) what = absl::StrCat(line_, ": ", what);
  return queue_->Enqueue(std::move(what), after, std::move(body), std::move(succeeded));
}

std::function<void()> NcclCommunicator::Count(CollectiveOp op, Phase phase, int64_t bytes) {
  return [counter = &traffic_.bytes[static_cast<int>(op)][static_cast<int>(phase)], bytes] {
    *counter += static_cast<uint64_t>(bytes);
  };
}

Event NcclCommunicator::AllGather(void* buffer, int64_t count, DType type,
                                  const CollectiveInfo& info, const Event& after) {
  return Enqueue(
      NameOf(CollectiveOp::kAllGather), info, after,
      [=, this] { return PutAllGather(buffer, count, type); },
      Count(CollectiveOp::kAllGather, info.phase, AllGatherBytes(count, type, size_)));
}

std::vector<Event> NcclCommunicator::AllGatherTogether(const std::vector<GatherPart>& parts,
                                                       DType type, const CollectiveInfo& info,
                                                       const Event& after) {
  int64_t bytes = 0;
  for (const GatherPart& part : parts) bytes += AllGatherBytes(part.count, type, size_);
  const Event all = Enqueue(
      NameOf(CollectiveOp::kAllGather), info, after,
      [this, type, parts] { return PutAllGathers(parts, type); },
      Count(CollectiveOp::kAllGather, info.phase, bytes));
  return std::vector<Event>(parts.size(), all);
}

Event NcclCommunicator::ReduceScatter(ReduceScatterArgs args, const CollectiveInfo& info,
                                      const Event& after) {
  const int64_t bytes =  // wrong arguments do not succeed
      static_cast<int>(args.counts.size()) != size_
          ? 0
          : ReduceScatterBytes(args.counts, args.contributors, args.type, rank_);
  return Enqueue(
      NameOf(CollectiveOp::kReduceScatter), info, after,
      [this, args = std::move(args)] { return PutReduceScatter(args); },
      Count(CollectiveOp::kReduceScatter, info.phase, bytes));
}

Event NcclCommunicator::AllReduce(void* buffer, int64_t count, DType type,
                                  const CollectiveInfo& info, const Event& after) {
  return Enqueue(
      NameOf(CollectiveOp::kAllReduce), info, after,
      [=, this] { return PutAllReduce(buffer, count, type); },
      Count(CollectiveOp::kAllReduce, info.phase, AllReduceBytes(count, type, size_, rank_)));
}

Event NcclCommunicator::Broadcast(void* buffer, int64_t bytes, int root, const CollectiveInfo& info,
                                  const Event& after) {
  return Enqueue(
      NameOf(CollectiveOp::kBroadcast), info, after,
      [=, this] { return PutBroadcast(buffer, bytes, root); },
      Count(CollectiveOp::kBroadcast, info.phase, BroadcastBytes(bytes, root, size_, rank_)));
}

Event NcclCommunicator::Send(const void* buffer, int64_t bytes, int peer,
                             const CollectiveInfo& info, const Event& after) {
  return Enqueue(
      NameOf(CollectiveOp::kSend), info, after, [=, this] { return PutSend(buffer, bytes, peer); },
      Count(CollectiveOp::kSend, info.phase, bytes));
}

Event NcclCommunicator::Recv(void* buffer, int64_t bytes, int peer, const CollectiveInfo& info,
                             const Event& after) {
  return Enqueue(
      "recv", info, after, [=, this] { return PutRecv(buffer, bytes, peer); }, nullptr);
}

Event NcclCommunicator::Exchange(std::vector<Message> messages, const CollectiveInfo& info,
                                 const Event& after) {
  std::vector<std::function<void()>> counts;
  for (const Message& m : messages)
    if (m.send) counts.push_back(Count(CollectiveOp::kSend, m.phase, m.bytes));
  return Enqueue(
      "exchange", info, after,
      [this, messages = std::move(messages)] { return PutExchange(messages); },
      [counts = std::move(counts)] {
        for (const std::function<void()>& count : counts) count();
      });
}

Event NcclCommunicator::Barrier(const CollectiveInfo& info) {
  return Enqueue(
      "barrier", info, {}, [this] { return PutBarrier(); }, nullptr);
}

absl::Status NcclCommunicator::AllGatherHost(void* buffer, int64_t bytes,
                                             const CollectiveInfo& info) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("all_gather of host memory: bytes is ", bytes, ", expected 0 or more"));
  }
  absl::MutexLock lock(&host_mutex_);
  const int64_t piece = std::max<int64_t>(1, std::min(bytes, tuning_.host_bytes / size_));
  if (static_cast<int64_t>(host_.bytes()) < piece * size_) {
    ZS_ASSIGN_OR_RETURN(host_, device_->AllocateHost(static_cast<size_t>(piece * size_)));
  }
  char* const all = static_cast<char*>(buffer);
  char* const pinned = host_.as<char>();
  int64_t start = 0;
  do {  // at least once: a communicator that failed says so
    const int64_t n = std::min(piece, bytes - start);
    if (n > 0) std::memcpy(pinned + rank_ * n, all + rank_ * bytes + start, n);
    const Event event = Enqueue(
        NameOf(CollectiveOp::kAllGather), info, {}, [this, n] { return PutHostGather(n); },
        Count(CollectiveOp::kAllGather, info.phase, AllGatherBytes(n, DType::kU8, size_)));
    ZS_RETURN_IF_ERROR(event.Wait());
    for (int rank = 0; rank < size_ && n > 0; ++rank) {
      if (rank != rank_) std::memcpy(all + rank * bytes + start, pinned + rank * n, n);
    }
    start += n;
  } while (start < bytes);
  return absl::OkStatus();
}

absl::StatusOr<Registration> NcclCommunicator::Register(void* data, size_t bytes) {
  if (size_ == 1 || bytes == 0) return Registration();
  const CollectiveInfo info{.unit = absl::StrCat("a buffer of ", bytes, " bytes")};
  auto handle = std::make_shared<void*>(nullptr);
  const auto begin = [this, info, data, bytes, handle] {
    return queue_->Call([&](NcclComm* comm) {
      const NcclResult result = api_->Register(comm, data, bytes, handle.get());
      if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) return result;
      // Unregistered memory is copied on its way and as good otherwise.
      *handle = nullptr;
      LogWarning("NCCL does not register ", info.unit, " (", api_->Describe(result, comm),
                 "); it is sent from without");
      return NcclResult::kSuccess;
    });
  };
  ZS_RETURN_IF_ERROR(Enqueue("registration", info, {}, begin, nullptr).Wait());
  return Registration([this, info, handle] {
    // Where the communicator failed it has ended this too.
    if (*handle == nullptr) return;
    const auto end = [this, handle] {
      return queue_->Call([&](NcclComm* comm) { return api_->Deregister(comm, *handle); });
    };
    Enqueue("end of the registration", info, {}, end, nullptr).Wait().IgnoreError();
  });
}

void NcclCommunicator::Abort(const std::string& reason) {
  queue_->Fail(absl::AbortedError(absl::StrCat("aborted: ", reason)));
}

absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(
    const CommunicatorOptions& options, const NcclTuning& tuning, std::shared_ptr<NcclApi> api,
    Rendezvous* rendezvous, Device* device) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", options.rank, " of ", options.size, " ranks does not exist"));
  }
  if (options.size > 1 && rendezvous == nullptr) {
    return absl::InvalidArgumentError("more than one rank, and no rendezvous to meet at");
  }
  api->EnterThread();
  NcclStream* stream = nullptr;
  ZS_ASSIGN_OR_RETURN(stream, api->NewStream());
  NcclComm* comm = nullptr;
  if (options.size > 1) {
    absl::StatusOr<NcclComm*> connected =
        ConnectNccl(api.get(), options, tuning.ending, rendezvous);
    if (!connected.ok()) {
      api->DeleteStream(stream);
      return connected.status();
    }
    comm = *connected;
  }
  return std::make_unique<NcclCommunicator>(options, tuning, std::move(api), comm, stream, device);
}

}  // namespace zeroshard
