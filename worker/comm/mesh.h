// One rank's TCP connections to all others, and waits on them that always end: with the data, at
// the deadline, when a peer is gone, or when another thread interrupts them. Below the collectives;
// knows nothing of operations.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gloo/transport/context.h"
#include "gloo/transport/device.h"
#include "gloo/transport/unbound_buffer.h"
#include "worker/comm/communicator.h"

namespace zeroshard {

using MessageBuffer = gloo::transport::UnboundBuffer;

// Messages of `buffer` from or to `peer` that have been posted and are still to complete.
struct Await {
  MessageBuffer* buffer = nullptr;
  int peer = 0;
  bool receive = false;
  int64_t completions = 0;
};

// All methods but Interrupt belong to one thread at a time (the communication stream). Messages on
// one (pair, direction, slot) arrive in the order they were posted; memory handed to Wrap is read
// and written by the transport's own thread until the buffer is destroyed.
class Mesh {
 public:
  // Publishes this rank's addresses, waits for the others', connects to each, and exchanges a
  // greeting that proves who is on the line, all within options.connect_timeout.
  // DEADLINE_EXCEEDED or UNAVAILABLE name the ranks that did not come; ABORTED: options.cancelled.
  static absl::StatusOr<std::unique_ptr<Mesh>> Connect(const CommunicatorOptions& options,
                                                       Rendezvous* rendezvous);
  ~Mesh();  // closes

  // Slots at or above this are the caller's.
  static constexpr uint64_t kFirstFreeSlot = 16;

  absl::StatusOr<std::unique_ptr<MessageBuffer>> Wrap(void* data, int64_t bytes);
  // UNAVAILABLE where the peer is gone.
  absl::Status PostReceive(MessageBuffer& buffer, int peer, uint64_t slot, int64_t offset,
                           int64_t bytes);
  absl::Status PostSend(MessageBuffer& buffer, int peer, uint64_t slot, int64_t offset,
                        int64_t bytes);

  // Every AwaitAll between Begin and End ends `timeout` after Begin, or earlier; later where
  // CommunicatorOptions::presence says so.
  void Begin(absl::Duration timeout);
  void End();
  // Returns when all have completed. DEADLINE_EXCEEDED names the peers whose messages are missing;
  // UNAVAILABLE the peer that is gone, also where another of `awaits` is waited for at that moment;
  // else the status given to Interrupt. After an error nothing but Close may be called.
  absl::Status AwaitAll(absl::Span<Await> awaits);

  // Any thread: pending and later waits return `status`, which must not be OK.
  void Interrupt(const absl::Status& status);

  // Tells the peers why this rank leaves (where not OK), then drops the connections. All buffers
  // from Wrap must be gone. Idempotent.
  void Close(const absl::Status& why);
  // The rank that the last error was about, or -1. The communication thread's.
  int blamed() const { return blamed_; }

 private:
  using Clock = std::chrono::steady_clock;
  // What a rank that gives up tells the others, as it lies on the wire (all ranks run on
  // little-endian machines of one build, as the transport itself requires).
  struct Farewell {
    static constexpr uint32_t kMagic = 0x5a534657;
    uint32_t magic = 0;
    int32_t code = 0;     // absl::StatusCode
    int32_t blamed = -1;  // the rank it gave up on, or -1
    std::array<char, 244> text{};
  };

  explicit Mesh(const CommunicatorOptions& options);
  absl::Status CreatePairs();
  absl::Status ExchangeAddresses(Rendezvous* rendezvous, Clock::time_point deadline);
  absl::Status ConnectPairs();
  absl::Status Greet();
  absl::Status PostGuards();

  static constexpr uint64_t kAliveSlot = 1;  // nothing is ever sent there
  static constexpr uint64_t kFarewellSlot = 2;
  static constexpr uint64_t kGreetingSlot = 3;

  absl::Status AwaitNext(absl::Span<Await> rest);
  absl::Status DeadlineError(absl::Span<Await> rest);
  absl::Status LostError(int peer);
  // Takes what `peer`, whose connection is closed, had still delivered; an error if that is not
  // all.
  absl::Status DrainLost(absl::Span<Await> rest, int peer);
  // Waits for one completion, until about `limit` has passed. False also where the connection
  // broke.
  bool TakeWithin(Await& await, Clock::duration limit);
  bool SaidFarewell(int peer);
  // `peer`, and the other ranks whose connections broke without a farewell.
  std::set<int> SilentlyBroken(int peer);
  // While the caller's buffers still exist: a message that is half sent holds back the farewell.
  void SayFarewell(const absl::Status& why);

  void Watch();
  void Check() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool TimeIsUp() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the wait that is pending, be it for a message or for a connection.
  void EndWaits() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Cancelled() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // OK, or why connecting ends before all are there.
  absl::Status ConnectVerdict(int peer, const std::string& error)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsBroken(int peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeWaiter() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int rank_;
  const int size_;
  const std::string host_;
  const absl::Duration connect_timeout_;

  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  uint64_t nonce_ = 0;
  std::vector<std::vector<char>> peer_addresses_;
  std::vector<uint64_t> peer_nonces_;

  // Guards: on each connection one receive that no message ever answers, which the transport fails
  // when the connection breaks (it does not fail transfers that are half done), and one for the
  // peer's farewell.
  std::vector<std::unique_ptr<MessageBuffer>> alive_ ABSL_GUARDED_BY(mutex_);
  char alive_byte_ = 0;
  std::vector<Farewell> farewells_;
  std::vector<std::unique_ptr<MessageBuffer>> farewell_buffers_;
  Farewell own_farewell_;
  std::vector<std::unique_ptr<MessageBuffer>> own_farewell_buffers_;
  int blamed_ = -1;  // whom the last error was about
  bool farewell_said_ = false;
  Clock::time_point started_;

  absl::Mutex mutex_;
  absl::CondVar wake_watcher_;
  bool watcher_asleep_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_watcher_ ABSL_GUARDED_BY(mutex_) = false;
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool connecting_ ABSL_GUARDED_BY(mutex_) = false;
  const std::atomic<bool>* cancelled_ ABSL_GUARDED_BY(mutex_);  // the caller's; null once connected
  Clock::time_point deadline_ ABSL_GUARDED_BY(mutex_);
  Clock::duration timeout_ ABSL_GUARDED_BY(mutex_){};
  // The caller's; null until connected.
  std::shared_ptr<const Presence> presence_ ABSL_GUARDED_BY(mutex_);
  absl::Status interrupt_ ABSL_GUARDED_BY(mutex_);
  bool expired_ ABSL_GUARDED_BY(mutex_) = false;
  int lost_peer_ ABSL_GUARDED_BY(mutex_) = -1;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;  // the pending wait ends at drain_until_
  Clock::time_point drain_until_ ABSL_GUARDED_BY(mutex_);
  Await* waiting_ ABSL_GUARDED_BY(mutex_) = nullptr;
  absl::Span<const Await> awaited_ ABSL_GUARDED_BY(mutex_);
  std::thread watcher_;
};

}  // namespace zeroshard
