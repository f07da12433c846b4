// The store's side of one Bulk stream, on gRPC's callback interface.
//
// Bounded whatever the peer does: one message is read at a time, and none while kMostPulls pulls
// are unanswered or unsent, or while a push is too early to be staged; one message is written at a
// time, made when its turn comes; answers that wait for their turn are pins, or at most
// kMostCopies copies; acknowledgements that wait melt into one. A stream that ends lets go of the
// answers that wait at once, and of the one that is being written kEndSeconds later at the latest:
// a peer that reads nothing keeps no parameters.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/time/time.h"
#include "common/bulk/transport/frame_buffer.h"
#include "grpcpp/alarm.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "shard_store/service/bulk_session.h"

namespace zeroshard::store {

// Pins that gRPC holds, over all streams. Thread-safe.
class PinTally {
 public:
  // What `pin` holds, counted until gRPC lets go of it.
  static std::shared_ptr<const void> Count(std::shared_ptr<PinTally> tally,
                                           std::shared_ptr<const void> pin);
  // False: after `timeout` there are some still.
  bool AwaitNone(absl::Duration timeout);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

// Lives until gRPC is done with it and nothing calls it any more.
class BulkStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                         public std::enable_shared_from_this<BulkStream> {
 public:
  static constexpr int kMostPulls = 64;
  static constexpr int kMostCopies = 4;  // of state, each of one frame
  static constexpr int kHelloSeconds = 10;
  static constexpr int kEndSeconds = 1;   // for a write that was open when the stream ended
  static constexpr int kLastSeconds = 5;  // then for why it ended

  // For a call that has just arrived; `context` is that call's. `open` outlives the stream.
  // `silent` is kept until the hello.
  static BulkStream* Start(grpc::CallbackServerContext* context, const OpenSession* open,
                           std::shared_ptr<PinTally> pins, std::shared_ptr<const void> silent);

 private:
  // Parameters or state on their way out.
  struct Answer {
    bulk::Header header;  // of the next frame; begin and count are set for each
    bool copy = false;    // counts among the copies
    PinnedParameters data;
    size_t sent = 0;  // bytes
  };

  BulkStream(grpc::CallbackServerContext* context, const OpenSession* open,
             std::shared_ptr<PinTally> pins, std::shared_ptr<const void> silent)
      : context_(context), open_(open), pins_(std::move(pins)), silent_(std::move(silent)) {}

  // --- on the thread that reads; without the lock ---
  // TooEarly: a push that is kept, and taken again later.
  absl::Status Take(bulk::ReceivedFrame* frame);
  // What was read is dealt with, so: reads on, or ends the stream.
  void Taken(absl::Status status);
  void WaitForPush(const std::shared_ptr<bulk::ReceivedFrame>& frame);
  // False: it is too early still.
  bool TakeAgain(bulk::ReceivedFrame* frame, const absl::Status& ready);
  std::shared_ptr<BulkSession> session();
  absl::Status SayHello(const bulk::ReceivedFrame& frame);
  void StartPull(BulkSession* session, const bulk::Header& header);
  absl::Status AnswerState(BulkSession* session, const bulk::Header& header);

  // From any thread, without the lock.
  void OnPulled(const bulk::Header& header, absl::StatusOr<PinnedParameters> data);
  // Ends the stream with this status; the first one counts.
  void End(absl::Status status);
  void WriteNext();
  // Some time after the end: cancels the call where a write is still open; `last`: also where it is
  // that of the reason, or where the call's own end does not get through.
  void Cut(bool last);

  // --- with the lock ---
  // Where the next frame of the first answer lies: in this slot, or nothing: in itself. False: the
  // peer will say when a slot is free.
  bool TakeSlot(const Answer& answer, std::optional<int>* slot);
  void ReadOn();       // reads on where it may
  void MaybeFinish();  // ends the call where it is time
  // Nothing but the reason is written any more. Gives back what is to be let go of without the
  // lock.
  std::deque<Answer> BeginEnd(absl::Status status);
  std::deque<Answer> TakeAnswers();  // all but the one that is being written

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  grpc::CallbackServerContext* const context_;
  const OpenSession* const open_;
  const std::shared_ptr<PinTally> pins_;
  std::shared_ptr<const void> silent_;  // the reading side's
  grpc::Alarm hello_alarm_;
  grpc::Alarm end_alarm_, last_alarm_;
  uint64_t generation_ = 0;
  grpc::ByteBuffer incoming_;
  grpc::ByteBuffer outgoing_;

  std::mutex mutex_;
  std::condition_variable cut_;                 // `cutting_` is over
  std::shared_ptr<BulkSession> session_;        // from the hello to the end of the call
  std::shared_ptr<bulk::SharedRegion> region_;  // of the hello; null: payloads travel in frames
  bool reading_ = false;                        // a read is open, or what it brought is being taken
  bool push_waits_ = false;                     // that is a push which is too early
  bool writing_ = false;                        // a write is open, or being made
  bool read_ended_ = false;
  bool welcome_ = false;  // to be sent
  bool acknowledge_ = false;
  uint32_t acknowledged_ = 0;  // tag
  int pulls_ = 0;              // unanswered or not sent to their end
  int copies_ = 0;             // among them
  std::deque<Answer> answers_;
  bool ending_ = false;
  bool saying_why_ = false;  // the reason is being written, or was
  bool cutting_ = false;     // the call is being cancelled: it must not end meanwhile
  bool cancelled_ = false;   // nobody hears us any more
  bool finished_ = false;    // nothing may be started any more
  absl::Status end_;
  std::shared_ptr<BulkStream> self_;  // until gRPC is done
};

}  // namespace zeroshard::store
