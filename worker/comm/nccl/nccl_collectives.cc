// The collectives as groups of NCCL calls and sums on one stream.
#include <algorithm>
#include <utility>

#include "common/status_macros.h"
#include "worker/comm/arguments.h"
#include "worker/comm/nccl/nccl_communicator.h"
#include "worker/comm/traffic.h"

namespace zeroshard {
namespace {

// The first call in a group that NCCL refuses is the group's result.
void Then(NcclResult* result, NcclResult call) {
  if (*result == NcclResult::kSuccess && call != NcclResult::kInProgress) *result = call;
}

// Staging is cut at multiples of this, so that sums read it in aligned packs.
constexpr int64_t kAlignment = 64;

}  // namespace

absl::StatusOr<char*> NcclCommunicator::Staging(int64_t bytes) {
  if (bytes > static_cast<int64_t>(staging_.bytes())) {
    ZS_RETURN_IF_ERROR(queue_->AwaitStream());
    staging_ = Buffer();  // before the new one, so that both are never there at once
    ZS_ASSIGN_OR_RETURN(staging_,
                        device_->Allocate(static_cast<size_t>(bytes), MemoryKind::kBuffers));
  }
  return staging_.as<char>();
}

absl::Status NcclCommunicator::PutAllGather(void* buffer, int64_t count, DType type) {
  return PutAllGathers({{buffer, count}}, type);
}

absl::Status NcclCommunicator::PutAllGathers(const std::vector<GatherPart>& parts, DType type) {
  bool any = false;
  for (const GatherPart& part : parts) {
    ZS_RETURN_IF_ERROR(CheckCount("count", part.count));
    any |= part.count > 0;
  }
  if (size_ == 1 || !any) return absl::OkStatus();
  return queue_->Group([&](NcclComm* comm) {
    NcclResult result = NcclResult::kSuccess;
    for (const GatherPart& part : parts) {
      if (part.count == 0) continue;
      const char* own =
          static_cast<char*>(part.buffer) + rank_ * part.count * static_cast<int64_t>(SizeOf(type));
      Then(&result, api_->AllGather(own, part.buffer, part.count, type, comm, queue_->stream()));
    }
    return result;
  });
}

absl::Status NcclCommunicator::PutReduceScatter(const ReduceScatterArgs& args) {
  ZS_RETURN_IF_ERROR(CheckArgs(args, size_));
  const int64_t own_bytes = args.counts[rank_] * static_cast<int64_t>(SizeOf(args.type));
  const bool equal = std::all_of(args.counts.begin(), args.counts.end(),
                                 [&](int64_t count) { return count == args.counts[0]; });
  const bool plain = args.output_type == args.type && !args.accumulate;
  if (!deterministic_ && size_ > 1 && equal && args.contributors == size_ &&
      (plain || own_bytes <= tuning_.scratch_bytes)) {
    return PutNcclReduceScatter(args);
  }
  FoldExchange exchange;
  exchange.input = static_cast<const char*>(args.input);
  exchange.type = args.type;
  exchange.counts = args.counts;
  exchange.starts.resize(size_);
  for (int rank = 1; rank < size_; ++rank) {
    exchange.starts[rank] = exchange.starts[rank - 1] + args.counts[rank - 1];
  }
  exchange.contributors = args.contributors;
  exchange.output = static_cast<char*>(args.output);
  exchange.output_type = args.output_type;
  exchange.accumulate = args.accumulate;
  return PutFold(exchange);
}

absl::Status NcclCommunicator::PutNcclReduceScatter(const ReduceScatterArgs& args) {
  const int64_t count = args.counts[rank_];
  if (count == 0) return absl::OkStatus();
  const bool plain = args.output_type == args.type && !args.accumulate;
  void* sum = args.output;
  if (!plain) {
    ZS_ASSIGN_OR_RETURN(sum, Staging(count * static_cast<int64_t>(SizeOf(args.type))));
  }
  ZS_RETURN_IF_ERROR(queue_->Group([&](NcclComm* comm) {
    return api_->ReduceScatter(args.input, sum, count, args.type, comm, queue_->stream());
  }));
  if (plain) return absl::OkStatus();
  FoldArgs fold;
  fold.staged = sum;
  fold.contributors = 1;
  fold.type = args.type;
  fold.count = count;
  fold.accumulate = args.accumulate;
  fold.out = args.output;
  fold.output_type = args.output_type;
  return api_->Fold(fold, queue_->stream());
}

// Round k exchanges the k-th piece of every owner's part; an owner sums its own before the next
// round overwrites the staging.
absl::Status NcclCommunicator::PutFold(const FoldExchange& exchange) {
  const int64_t most = *std::max_element(exchange.counts.begin(), exchange.counts.end());
  int64_t piece = most;
  if (size_ > 1) {
    const int64_t fits = tuning_.staging_bytes /
                         (exchange.contributors * static_cast<int64_t>(SizeOf(exchange.type)));
    piece = std::min(most, std::max(kAlignment, fits / kAlignment * kAlignment));
  }
  for (int64_t start = 0; start < most; start += piece) {
    ZS_RETURN_IF_ERROR(PutPiece(exchange, start, piece));
  }
  return absl::OkStatus();
}

absl::Status NcclCommunicator::PutPiece(const FoldExchange& exchange, int64_t start,
                                        int64_t piece) {
  const int64_t element = static_cast<int64_t>(SizeOf(exchange.type));
  const auto count_of = [&](int owner) {
    return std::clamp<int64_t>(exchange.counts[owner] - start, 0, piece);
  };
  const bool contributes = rank_ < exchange.contributors;
  const int64_t own = count_of(rank_);
  FoldArgs fold;
  fold.stride = RoundUp(own, kAlignment);
  fold.contributors = exchange.contributors;
  fold.type = exchange.type;
  fold.count = own;
  fold.accumulate = exchange.accumulate;
  fold.out = exchange.output + start * static_cast<int64_t>(SizeOf(exchange.output_type));
  fold.output_type = exchange.output_type;
  if (contributes) {
    fold.own_rank = rank_;
    fold.own = exchange.input + (exchange.starts[rank_] + start) * element;
  }
  const int64_t others = exchange.contributors - (contributes ? 1 : 0);
  char* staged = nullptr;
  if (others > 0 && own > 0) {
    ZS_ASSIGN_OR_RETURN(staged, Staging(others * fold.stride * element));
  }
  fold.staged = staged;

  const auto exchange_piece = [&](NcclComm* comm) {
    NcclResult result = NcclResult::kSuccess;
    char* to = staged;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      if (contributes && count_of(peer) > 0) {
        const char* from = exchange.input + (exchange.starts[peer] + start) * element;
        Then(&result,
             api_->Send(from, count_of(peer), exchange.type, peer, comm, queue_->stream()));
      }
      if (peer < exchange.contributors && own > 0) {
        Then(&result, api_->Receive(to, own, exchange.type, peer, comm, queue_->stream()));
        to += fold.stride * element;
      }
    }
    return result;
  };
  if (size_ > 1) ZS_RETURN_IF_ERROR(queue_->Group(exchange_piece));
  return own > 0 ? api_->Fold(fold, queue_->stream()) : absl::OkStatus();
}

absl::Status NcclCommunicator::PutAllReduce(void* buffer, int64_t count, DType type) {
  ZS_RETURN_IF_ERROR(CheckSum(type));
  ZS_RETURN_IF_ERROR(CheckCount("count", count));
  if (count == 0) return absl::OkStatus();
  if (!deterministic_ && size_ > 1) {
    return queue_->Group([&](NcclComm* comm) {
      return api_->AllReduce(buffer, buffer, count, type, comm, queue_->stream());
    });
  }
  if (count <= kDirectAllReduce) return PutSmallSum(buffer, count, type);
  FoldExchange exchange;
  exchange.input = static_cast<char*>(buffer);
  exchange.type = exchange.output_type = type;
  exchange.contributors = size_;
  for (int rank = 0; rank < size_; ++rank) {
    exchange.starts.push_back(PartStart(count, size_, rank));
    exchange.counts.push_back(PartCount(count, size_, rank));
  }
  exchange.output =
      static_cast<char*>(buffer) + exchange.starts[rank_] * static_cast<int64_t>(SizeOf(type));
  ZS_RETURN_IF_ERROR(PutFold(exchange));
  return PutGatherParts(static_cast<char*>(buffer), exchange);
}

absl::Status NcclCommunicator::PutSmallSum(void* buffer, int64_t count, DType type) {
  FoldArgs fold;
  fold.contributors = size_;
  fold.type = fold.output_type = type;
  fold.count = count;
  fold.out = buffer;
  if (size_ == 1) {
    fold.own = buffer;
    fold.own_rank = 0;
    return api_->Fold(fold, queue_->stream());
  }
  const int64_t bytes = count * static_cast<int64_t>(SizeOf(type));
  char* staged = nullptr;
  ZS_ASSIGN_OR_RETURN(staged, Staging(size_ * bytes));
  ZS_RETURN_IF_ERROR(queue_->Group([&](NcclComm* comm) {
    return api_->AllGather(buffer, staged, count, type, comm, queue_->stream());
  }));
  fold.staged = staged;
  fold.stride = count;
  return api_->Fold(fold, queue_->stream());
}

absl::Status NcclCommunicator::PutGatherParts(char* buffer, const FoldExchange& parts) {
  if (size_ == 1) return absl::OkStatus();
  const int64_t element = static_cast<int64_t>(SizeOf(parts.type));
  if (parts.counts.back() == parts.counts.front()) {  // only the last ones are shorter
    return PutAllGather(buffer, parts.counts.front(), parts.type);
  }
  return queue_->Group([&](NcclComm* comm) {
    NcclResult result = NcclResult::kSuccess;
    for (int owner = 0; owner < size_; ++owner) {
      if (parts.counts[owner] == 0) continue;
      Then(&result, api_->Broadcast(buffer + parts.starts[owner] * element, parts.counts[owner],
                                    parts.type, owner, comm, queue_->stream()));
    }
    return result;
  });
}

absl::Status NcclCommunicator::PutBroadcast(void* buffer, int64_t bytes, int root) {
  ZS_RETURN_IF_ERROR(CheckCount("bytes", bytes));
  ZS_RETURN_IF_ERROR(CheckRoot(root, size_));
  if (size_ == 1 || bytes == 0) return absl::OkStatus();
  return queue_->Group([&](NcclComm* comm) {
    return api_->Broadcast(buffer, bytes, DType::kU8, root, comm, queue_->stream());
  });
}

absl::Status NcclCommunicator::PutSend(const void* buffer, int64_t bytes, int peer) {
  return PutExchange(
      {{.send = true, .buffer = const_cast<void*>(buffer), .bytes = bytes, .peer = peer}});
}

absl::Status NcclCommunicator::PutRecv(void* buffer, int64_t bytes, int peer) {
  return PutExchange({{.buffer = buffer, .bytes = bytes, .peer = peer}});
}

// In a group none waits for another, and those of a pair and direction match in order.
absl::Status NcclCommunicator::PutExchange(const std::vector<Message>& messages) {
  bool any = false;
  for (const Message& m : messages) {
    ZS_RETURN_IF_ERROR(CheckMessage(m.bytes, m.peer, rank_, size_));
    any |= m.bytes > 0;
  }
  if (!any) return absl::OkStatus();
  return queue_->Group([&](NcclComm* comm) {
    NcclResult result = NcclResult::kSuccess;
    for (const Message& m : messages) {
      if (m.bytes == 0) continue;  // at both ends
      Then(&result,
           m.send ? api_->Send(m.buffer, m.bytes, DType::kU8, m.peer, comm, queue_->stream())
                  : api_->Receive(m.buffer, m.bytes, DType::kU8, m.peer, comm, queue_->stream()));
    }
    return result;
  });
}

absl::Status NcclCommunicator::PutBarrier() {
  if (size_ == 1) return absl::OkStatus();
  char* flags = nullptr;
  ZS_ASSIGN_OR_RETURN(flags, Staging(size_));
  return PutAllGather(flags, 1, DType::kU8);
}

absl::Status NcclCommunicator::PutHostGather(int64_t bytes) {
  if (size_ == 1 || bytes == 0) return absl::OkStatus();
  char* staged = nullptr;
  ZS_ASSIGN_OR_RETURN(staged, Staging(size_ * bytes));
  char* const pinned = host_.as<char>();
  ZS_RETURN_IF_ERROR(api_->Copy(staged + rank_ * bytes, pinned + rank_ * bytes,
                                static_cast<size_t>(bytes), queue_->stream()));
  ZS_RETURN_IF_ERROR(PutAllGather(staged, bytes, DType::kU8));
  return api_->Copy(pinned, staged, static_cast<size_t>(size_ * bytes), queue_->stream());
}

}  // namespace zeroshard
