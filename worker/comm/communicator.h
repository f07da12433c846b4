// Collectives behind one interface, over memory of the device. Every operation is enqueued on the
// communicator's own stream and returns an event, so that it overlaps with compute; all ranks must
// enqueue the same operations in the same order. An operation starts after `after` is complete.
// Errors (in the event's status):
//   DEADLINE_EXCEEDED  the wait took longer than the timeout; UNAVAILABLE a peer is gone;
//   ABORTED            Abort() was called; each names operation, unit, step, phase and peer.
// After an error the communicator is unusable and every further event carries an error at once.
// INVALID_ARGUMENT names a wrong argument; the first error of the work before `after` is passed on.
// When an operation's event is done, with whatever status, the caller's memory is no longer
// touched.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/presence.h"
#include "common/types.h"
#include "worker/device/device.h"

namespace zeroshard {

enum class CollectiveOp : uint8_t { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kSend };
enum class Phase : uint8_t { kForward, kBackward, kStep };
constexpr int kCollectiveOps = 5;
constexpr int kPhases = 3;
const char* NameOf(CollectiveOp op);
const char* NameOf(Phase phase);

// Who asks and why: labels the traffic and the messages.
struct CollectiveInfo {
  Phase phase = Phase::kStep;
  std::string unit;  // "blocks.3"
  uint64_t step = 0;
};

// Bytes of payload this rank sent to others, by operation and phase, counted when the operation
// succeeds. With N ranks and elements of s bytes (worker/comm/traffic.h has them as functions):
//   all_gather      (N-1) * count * s
//   reduce_scatter  (sum of counts - counts[rank]) * s where rank < contributors, else 0
//   all_reduce      up to 4096 elements (N-1) * count * s; beyond, (count + (N-2) * own) * s with
//                   own = max(0, min(count - rank*S, S)), S = ceil(count / N); 0 where N is 1
//   broadcast       (N-1) * bytes at the root, else 0;   send: bytes;   recv, barrier: not counted
// Thread-safe counters.
struct TrafficCounters {
  std::array<std::array<std::atomic<uint64_t>, kPhases>, kCollectiveOps> bytes{};
  uint64_t Get(CollectiveOp op, Phase phase) const {
    return bytes[static_cast<int>(op)][static_cast<int>(phase)].load();
  }
};

// The owner of each element of the input adds all ranks' contributions to it.
struct ReduceScatterArgs {
  // This rank's contribution: the concatenation of counts[0] elements for rank 0, counts[1] for
  // rank 1, ... Only ranks below `contributors` contribute; the others' input is not read, and they
  // send nothing (their counts still say what they receive).
  const void* input = nullptr;
  DType type = DType::kF32;     // wire type: fp32, bf16 or fp16
  std::vector<int64_t> counts;  // elements by owner, one an rank, 0 allowed
  int contributors = 0;         // 1..size
  // out[i] = ((start + c_0[i]) + c_1[i]) + ... in fp32, in rank order; start is out[i] where
  // accumulate, else +0. counts[rank] elements of output_type (fp32, or `type`, then rounded once).
  // May be this rank's own part of the input (same type).
  void* output = nullptr;
  DType output_type = DType::kF32;
  bool accumulate = false;
};

// One gather of several that belong together: the arguments of AllGather.
struct GatherPart {
  void* buffer = nullptr;
  int64_t count = 0;
};

// One message of an exchange, under the phase that its traffic is counted in.
struct Message {
  bool send = false;
  void* buffer = nullptr;  // not written to where `send`
  int64_t bytes = 0;
  int peer = 0;
  Phase phase = Phase::kForward;
};

// Keeps memory registered for as long as it lives; movable. Goes before the memory and before the
// communicator, and once no operation uses the memory any more.
class Registration {
 public:
  Registration() = default;
  explicit Registration(std::function<void()> end) : end_(std::move(end)) {}
  Registration(Registration&& other) noexcept : end_(std::exchange(other.end_, nullptr)) {}
  Registration& operator=(Registration&& other) noexcept {
    std::swap(end_, other.end_);
    return *this;
  }
  ~Registration() {
    if (end_) end_();
  }

 private:
  std::function<void()> end_;
};

// Thread-safe, except for destruction. The destructor ends pending operations with ABORTED and does
// not wait for peers (only for the events that pending operations start after).
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // In place: rank r's part is `count` elements at buffer + r * count; afterwards all parts are
  // there.
  virtual Event AllGather(void* buffer, int64_t count, DType type, const CollectiveInfo& info,
                          const Event& after = {}) = 0;
  // The same of several buffers, in one operation where that is cheaper: an event each, which may
  // be the same one.
  virtual std::vector<Event> AllGatherTogether(const std::vector<GatherPart>& parts, DType type,
                                               const CollectiveInfo& info, const Event& after = {});
  virtual Event ReduceScatter(ReduceScatterArgs args, const CollectiveInfo& info,
                              const Event& after = {}) = 0;
  // Sum in rank order in fp32, the same bits on all ranks; type fp32, bf16 or fp16 (rounded once).
  virtual Event AllReduce(void* buffer, int64_t count, DType type, const CollectiveInfo& info,
                          const Event& after = {}) = 0;
  virtual Event Broadcast(void* buffer, int64_t bytes, int root, const CollectiveInfo& info,
                          const Event& after = {}) = 0;
  virtual Event Send(const void* buffer, int64_t bytes, int peer, const CollectiveInfo& info,
                     const Event& after = {}) = 0;
  virtual Event Recv(void* buffer, int64_t bytes, int peer, const CollectiveInfo& info,
                     const Event& after = {}) = 0;
  // Messages that belong together, done when all are: none waits for another, so that two ranks may
  // send to each other. Messages of a pair and direction match in order; both ends have each in
  // exchanges, or neither. Counted as sends. The default, of sends and receives alone, does one
  // after the other in an order that is the same on all ranks; others post all, then wait.
  virtual Event Exchange(std::vector<Message> messages, const CollectiveInfo& info,
                         const Event& after = {});
  virtual Event Barrier(const CollectiveInfo& info) = 0;

  // AllGather of `bytes` a rank in host memory; waits. For what ranks tell each other.
  virtual absl::Status AllGatherHost(void* buffer, int64_t bytes, const CollectiveInfo& info) = 0;

  // Memory of the device that collectives will use again and again, which the backend may then read
  // and write without a copy of its own. All ranks register corresponding memory, in the same order
  // as their operations. Waits for the operations before it; their errors, or the backend's.
  virtual absl::StatusOr<Registration> Register(void* data, size_t bytes) { return Registration(); }

  // Any thread: every pending and later operation ends with ABORTED and this reason, promptly.
  virtual void Abort(const std::string& reason) = 0;
  virtual const TrafficCounters& traffic() const = 0;
  // Seconds the communication stream was busy.
  virtual double BusySeconds() const = 0;
};

// Where ranks find each other, named by job and generation by whoever implements it (the
// coordinator in a cluster, a map in tests). Get waits at most `timeout`: DEADLINE_EXCEEDED names
// the key.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  virtual absl::Status Put(const std::string& key, const std::string& value) = 0;
  virtual absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) = 0;
};

struct CommunicatorOptions {
  int rank = 0;
  int size = 1;
  std::string host;  // address or name of the interface to listen on; empty: this host's
  absl::Duration connect_timeout = absl::Seconds(60);
  absl::Duration operation_timeout = absl::Seconds(300);
  // Not null: connecting ends with ABORTED soon after it becomes true. Looked at until
  // MakeGlooCommunicator returns; ending a Get of the rendezvous is the rendezvous' own affair.
  const std::atomic<bool>* cancelled = nullptr;
  // Not null: of an operation's wait only what this counts is held against its timeout.
  std::shared_ptr<const Presence> presence = nullptr;
  // Sums in rank order, the same bits for any world size. Gloo's always are.
  bool deterministic = true;
  // Of a line of a mesh (line_communicator.h): what messages call it, and by rank here the rank of
  // the job, which is who an error blames. Empty: the ranks are the job's.
  std::string line = "";
  std::vector<int> job_ranks = {};
};

// Full mesh over TCP, over host memory: of a device that is not the host, through
// StagedCommunicator (staged_communicator.h). Connects before it returns. UNAVAILABLE or
// DEADLINE_EXCEEDED name the ranks that did not come; ABORTED: options.cancelled. A single rank
// needs no network.
absl::StatusOr<std::unique_ptr<Communicator>> MakeGlooCommunicator(
    const CommunicatorOptions& options, Rendezvous* rendezvous, Device* device);

}  // namespace zeroshard
