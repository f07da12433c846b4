// The collectives as exchanges of messages. Every rank posts its receives before its sends.
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "worker/comm/arguments.h"
#include "worker/comm/fold.h"
#include "worker/comm/gloo_communicator.h"
#include "worker/comm/messages.h"
#include "worker/comm/traffic.h"

namespace zeroshard {
namespace {

// Two ranks send the same bytes either way, and one round has half the waits of two. Beyond this
// many elements waits matter less than the copy and than adding all of it twice.
constexpr int64_t kDirectAllReduceOfTwo = 1 << 20;

// What a slot's digest begins with.
enum Kind : int64_t { kGather = 1, kFold, kBroadcastKind, kBarrierKind };

// Bits 62..63 the kind of slot, 24..61 the number of the operation, 0..23 the digest (FNV-1a).
uint64_t MakeSlot(uint64_t kind, uint64_t number, absl::Span<const int64_t> arguments) {
  uint64_t digest = 0xcbf29ce484222325;
  for (int64_t argument : arguments) {
    for (int byte = 0; byte < 8; ++byte) {
      digest = (digest ^ ((static_cast<uint64_t>(argument) >> (8 * byte)) & 0xff)) * 0x100000001b3;
    }
  }
  digest = (digest ^ (digest >> 24) ^ (digest >> 48)) & 0xffffff;
  return (kind << 62) | ((number & ((uint64_t{1} << 38) - 1)) << 24) | digest;
}

}  // namespace

void GlooCommunicator::Count(CollectiveOp op, Phase phase, int64_t bytes) {
  traffic_.bytes[static_cast<int>(op)][static_cast<int>(phase)] += static_cast<uint64_t>(bytes);
}

uint64_t GlooCommunicator::CollectiveSlot(absl::Span<const int64_t> arguments) {
  return MakeSlot(1, operations_++, arguments);
}

absl::Status GlooCommunicator::RunAllGather(void* buffer, int64_t count, DType type, Phase phase) {
  if (absl::Status status = CheckCount("count", count); !status.ok()) return status;
  const int64_t part = count * static_cast<int64_t>(SizeOf(type));
  std::vector<int64_t> starts(size_);
  for (int rank = 0; rank < size_; ++rank) starts[rank] = rank * part;
  const std::vector<int64_t> bytes(size_, part);
  absl::Status status = GatherParts(static_cast<char*>(buffer), starts, bytes);
  if (!status.ok()) return status;
  Count(CollectiveOp::kAllGather, phase, AllGatherBytes(count, type, size_));
  return absl::OkStatus();
}

absl::Status GlooCommunicator::GatherParts(char* buffer, const std::vector<int64_t>& starts,
                                           const std::vector<int64_t>& bytes) {
  std::vector<int64_t> arguments{kGather};
  arguments.insert(arguments.end(), bytes.begin(), bytes.end());
  const uint64_t slot = CollectiveSlot(arguments);
  if (size_ == 1) return absl::OkStatus();
  Messages messages(*mesh_);
  for (int i = 1; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;
    absl::Status status = messages.Receive(buffer + starts[peer], bytes[peer], peer, slot);
    if (!status.ok()) return status;
  }
  for (int i = 1; i < size_; ++i) {
    absl::Status status =
        messages.Send(buffer + starts[rank_], bytes[rank_], (rank_ + i) % size_, slot);
    if (!status.ok()) return status;
  }
  return messages.AwaitAll();
}

absl::Status GlooCommunicator::RunReduceScatter(const ReduceScatterArgs& args, Phase phase) {
  if (absl::Status status = CheckArgs(args, size_); !status.ok()) return status;
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
  if (absl::Status status = Fold(exchange); !status.ok()) return status;
  Count(CollectiveOp::kReduceScatter, phase,
        ReduceScatterBytes(args.counts, args.contributors, args.type, rank_));
  return absl::OkStatus();
}

absl::Status GlooCommunicator::RunAllReduce(void* buffer, int64_t count, DType type, Phase phase) {
  if (absl::Status status = CheckSum(type); !status.ok()) return status;
  if (absl::Status status = CheckCount("count", count); !status.ok()) return status;
  const int64_t element = static_cast<int64_t>(SizeOf(type));
  char* const data = static_cast<char*>(buffer);
  FoldExchange exchange;
  exchange.type = exchange.output_type = type;
  exchange.contributors = size_;
  const int64_t direct = size_ == 2 ? kDirectAllReduceOfTwo : kDirectAllReduce;
  if (count <= direct) {
    const auto bytes = static_cast<size_t>(count * element);
    if (input_copy_.bytes() < bytes) {
      input_copy_ = Buffer();  // before the new one, so that both are never there at once
      absl::StatusOr<Buffer> copy = device_->AllocateHost(bytes);
      if (!copy.ok()) return copy.status();
      input_copy_ = *std::move(copy);
    }
    if (bytes > 0) std::memcpy(input_copy_.data(), data, bytes);
    exchange.input = input_copy_.as<char>();
    exchange.starts.assign(size_, 0);
    exchange.counts.assign(size_, count);
    exchange.output = data;
    if (absl::Status status = Fold(exchange); !status.ok()) return status;
  } else {
    std::vector<int64_t> starts, bytes;
    for (int rank = 0; rank < size_; ++rank) {
      exchange.starts.push_back(PartStart(count, size_, rank));
      exchange.counts.push_back(PartCount(count, size_, rank));
      starts.push_back(exchange.starts.back() * element);
      bytes.push_back(exchange.counts.back() * element);
    }
    exchange.input = data;
    exchange.output = data + starts[rank_];
    if (absl::Status status = Fold(exchange); !status.ok()) return status;
    if (absl::Status status = GatherParts(data, starts, bytes); !status.ok()) return status;
  }
  Count(CollectiveOp::kAllReduce, phase, AllReduceBytes(count, type, size_, rank_));
  return absl::OkStatus();
}

int64_t GlooCommunicator::PieceElements() const {
  const int64_t lanes = int64_t{std::max(1, size_ - 1)} * tuning_.pieces_in_flight;
  return std::clamp<int64_t>(tuning_.scratch_elements / lanes, 1, tuning_.piece_elements);
}

absl::Status GlooCommunicator::PrepareLanes(size_t lanes, int64_t bytes) {
  if (lanes <= lanes_.size() && bytes <= lane_bytes_) return absl::OkStatus();
  lane_bytes_ = RoundUp(std::max(bytes, lane_bytes_), 64);
  lanes = std::max(lanes, lanes_.size());
  lanes_.clear();
  lane_memory_ = Buffer();  // before the new one, so that both are never there at once
  const size_t total = lanes * static_cast<size_t>(lane_bytes_);
  absl::StatusOr<Buffer> memory = device_->AllocateHost(total);
  if (!memory.ok()) return memory.status();
  lane_memory_ = *std::move(memory);
  for (size_t lane = 0; lane < lanes; ++lane) {
    auto buffer = mesh_->Wrap(lane_memory_.as<char>() + lane * lane_bytes_, lane_bytes_);
    if (!buffer.ok()) return buffer.status();
    lanes_.push_back(*std::move(buffer));
  }
  return absl::OkStatus();
}

absl::Status GlooCommunicator::Fold(const FoldExchange& exchange) {
  const int64_t element = static_cast<int64_t>(SizeOf(exchange.type));
  const int64_t output_element = static_cast<int64_t>(SizeOf(exchange.output_type));
  const int64_t piece = PieceElements();
  std::vector<int64_t> arguments{kFold, exchange.contributors, static_cast<int64_t>(exchange.type),
                                 piece};
  arguments.insert(arguments.end(), exchange.counts.begin(), exchange.counts.end());
  const uint64_t slot = CollectiveSlot(arguments);

  const int64_t own = exchange.counts[rank_];
  const int64_t pieces = CeilDiv(own, piece);
  const int64_t window = std::min<int64_t>(tuning_.pieces_in_flight, pieces);
  auto count_of = [&](int64_t index) { return std::min(piece, own - index * piece); };
  std::vector<int> peers;  // who contributes to this rank's part, in order of ranks
  for (int rank = 0; own > 0 && rank < exchange.contributors; ++rank) {
    if (rank != rank_) peers.push_back(rank);
  }
  if (!peers.empty()) {
    absl::Status status = PrepareLanes(peers.size() * window, std::min(own, piece) * element);
    if (!status.ok()) return status;
  }
  // Lane of peer i and piece k: i * window + k mod window.
  auto receive = [&](int64_t index) -> absl::Status {
    for (size_t i = 0; i < peers.size(); ++i) {
      absl::Status status = mesh_->PostReceive(*lanes_[i * window + index % window], peers[i], slot,
                                               0, count_of(index) * element);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  };
  for (int64_t index = 0; index < window; ++index) {
    if (absl::Status status = receive(index); !status.ok()) return status;
  }

  std::optional<Messages> sends;
  if (size_ > 1 && rank_ < exchange.contributors) {
    sends.emplace(*mesh_);
    if (absl::Status status = SendContributions(exchange, slot, *sends); !status.ok())
      return status;
  }

  std::vector<Await> awaits(peers.size());
  std::vector<const void*> contributions(exchange.contributors);
  for (int64_t index = 0; index < pieces; ++index) {
    for (size_t i = 0; i < peers.size(); ++i) {
      MessageBuffer* lane = lanes_[i * window + index % window].get();
      awaits[i] = {lane, peers[i], true, 1};
      contributions[peers[i]] = lane->ptr;
    }
    if (rank_ < exchange.contributors) {
      contributions[rank_] = exchange.input + (exchange.starts[rank_] + index * piece) * element;
    }
    if (!awaits.empty()) {
      absl::Status status = mesh_->AwaitAll(absl::MakeSpan(awaits));
      if (!status.ok()) return status;
    }
    FoldInRankOrder(contributions, exchange.type, count_of(index), exchange.accumulate,
                    exchange.output + index * piece * output_element, exchange.output_type);
    if (index + window < pieces) {
      if (absl::Status status = receive(index + window); !status.ok()) return status;
    }
  }
  return sends ? sends->AwaitAll() : absl::OkStatus();
}

// Piece by piece over all owners, so that all of them get on.
absl::Status GlooCommunicator::SendContributions(const FoldExchange& exchange, uint64_t slot,
                                                 Messages& messages) {
  const int64_t element = static_cast<int64_t>(SizeOf(exchange.type));
  const int64_t piece = PieceElements();
  std::vector<size_t> sources(size_);
  int64_t most = 0;
  for (int owner = 0; owner < size_; ++owner) {
    const int64_t count = exchange.counts[owner];
    if (owner == rank_ || count == 0) continue;
    auto source = messages.AddSource(exchange.input + exchange.starts[owner] * element,
                                     count * element, owner);
    if (!source.ok()) return source.status();
    sources[owner] = *source;
    most = std::max(most, count);
  }
  for (int64_t start = 0; start < most; start += piece) {
    for (int i = 1; i < size_; ++i) {
      const int owner = (rank_ + i) % size_;
      const int64_t count = std::min(piece, exchange.counts[owner] - start);
      if (count <= 0) continue;
      absl::Status status =
          messages.SendPiece(sources[owner], slot, start * element, count * element);
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status GlooCommunicator::RunBroadcast(void* buffer, int64_t bytes, int root, Phase phase) {
  if (absl::Status status = CheckCount("bytes", bytes); !status.ok()) return status;
  if (absl::Status status = CheckRoot(root, size_); !status.ok()) return status;
  const uint64_t slot = CollectiveSlot({kBroadcastKind, bytes, root});
  if (size_ == 1) return absl::OkStatus();
  Messages messages(*mesh_);
  absl::Status status;
  if (rank_ != root) status = messages.Receive(buffer, bytes, root, slot);
  for (int i = 1; rank_ == root && i < size_ && status.ok(); ++i) {
    status = messages.Send(buffer, bytes, (rank_ + i) % size_, slot);
  }
  if (status.ok()) status = messages.AwaitAll();
  if (!status.ok()) return status;
  Count(CollectiveOp::kBroadcast, phase, BroadcastBytes(bytes, root, size_, rank_));
  return absl::OkStatus();
}

absl::Status GlooCommunicator::RunSend(const void* buffer, int64_t bytes, int peer, Phase phase) {
  if (absl::Status status = CheckMessage(bytes, peer, rank_, size_); !status.ok()) return status;
  const uint64_t slot = MakeSlot(2, sent_to_[peer]++, {bytes});
  Messages messages(*mesh_);
  absl::Status status = messages.Send(buffer, bytes, peer, slot);
  if (status.ok()) status = messages.AwaitAll();
  if (!status.ok()) return status;
  Count(CollectiveOp::kSend, phase, bytes);
  return absl::OkStatus();
}

absl::Status GlooCommunicator::RunRecv(void* buffer, int64_t bytes, int peer) {
  if (absl::Status status = CheckMessage(bytes, peer, rank_, size_); !status.ok()) return status;
  const uint64_t slot = MakeSlot(2, received_from_[peer]++, {bytes});
  Messages messages(*mesh_);
  absl::Status status = messages.Receive(buffer, bytes, peer, slot);
  return status.ok() ? messages.AwaitAll() : status;
}

absl::Status GlooCommunicator::RunExchange(const std::vector<Message>& exchange) {
  for (const Message& m : exchange) {
    absl::Status status = CheckMessage(m.bytes, m.peer, rank_, size_);
    if (!status.ok()) return status;
  }
  if (exchange.empty()) return absl::OkStatus();
  Messages messages(*mesh_);
  for (const bool send : {false, true}) {
    for (const Message& m : exchange) {
      if (m.send != send) continue;
      uint64_t& number = send ? sent_to_[m.peer] : received_from_[m.peer];
      const uint64_t slot = MakeSlot(2, number++, {m.bytes});
      absl::Status status = send ? messages.Send(m.buffer, m.bytes, m.peer, slot)
                                 : messages.Receive(m.buffer, m.bytes, m.peer, slot);
      if (!status.ok()) return status;
    }
  }
  if (absl::Status status = messages.AwaitAll(); !status.ok()) return status;
  for (const Message& m : exchange)
    if (m.send) Count(CollectiveOp::kSend, m.phase, m.bytes);
  return absl::OkStatus();
}

absl::Status GlooCommunicator::RunBarrier() {
  const uint64_t slot = CollectiveSlot({kBarrierKind});
  if (size_ == 1) return absl::OkStatus();
  std::vector<char> here(size_);
  Messages messages(*mesh_);
  for (int i = 1; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;
    if (absl::Status status = messages.Receive(&here[peer], 1, peer, slot); !status.ok()) {
      return status;
    }
  }
  for (int i = 1; i < size_; ++i) {
    if (absl::Status status = messages.Send(&here[rank_], 1, (rank_ + i) % size_, slot);
        !status.ok()) {
      return status;
    }
  }
  return messages.AwaitAll();
}

}  // namespace zeroshard
