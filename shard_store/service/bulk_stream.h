// The store's side of one Bulk stream, on gRPC's callback interface.
//
// Bounded whatever the peer does: one message is read at a time, and none while kMostPulls pulls
// are unanswered or unsent; one message is written at a time, made when its turn comes; answers
// that wait for their turn are pins, not copies; acknowledgements that wait melt into one.
#pragma once

#include <deque>
#include <memory>
#include <mutex>

#include "common/bulk/transport/frame_buffer.h"
#include "grpcpp/alarm.h"
#include "grpcpp/support/server_callback.h"
#include "shard_store/service/bulk_session.h"

namespace zeroshard::store {

// Lives until gRPC is done with it and nothing calls it any more.
class BulkStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                         public std::enable_shared_from_this<BulkStream> {
 public:
  static constexpr int kMostPulls = 64;
  static constexpr int kHelloSeconds = 10;

  // For a call that has just arrived. `open` outlives the stream.
  static BulkStream* Start(const OpenSession* open);

 private:
  // Parameters or state on their way out.
  struct Answer {
    bulk::Header header;  // of the next frame; begin and count are set for each
    uint32_t end = 0;     // elements from the chunk's begin
    bool pull = false;    // counts among the pulls
    PinnedParameters data;
    size_t sent = 0;  // bytes
  };

  explicit BulkStream(const OpenSession* open) : open_(open) {}

  // --- on the thread that reads; without the lock ---
  absl::Status Take(const bulk::ReceivedFrame& frame);
  absl::Status SayHello(const bulk::ReceivedFrame& frame);
  void StartPull(const bulk::Header& header);
  absl::Status AnswerState(const bulk::Header& header);

  // From any thread, without the lock.
  void OnPulled(const bulk::Header& header, absl::StatusOr<PinnedParameters> data);
  // Ends the stream with this status; the first one counts.
  void End(absl::Status status);
  void WriteNext();

  void ReadOn();       // with the lock: reads on where it may
  void MaybeFinish();  // with the lock: ends the call where it is time

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  const OpenSession* const open_;
  grpc::Alarm hello_alarm_;
  std::unique_ptr<BulkSession> session_;  // the reading thread's
  uint64_t generation_ = 0;
  grpc::ByteBuffer incoming_;
  grpc::ByteBuffer outgoing_;

  std::mutex mutex_;
  bool reading_ = false;  // a read is open, or what it brought is being taken
  bool writing_ = false;  // a write is open, or being made
  bool read_ended_ = false;
  bool welcome_ = false;  // to be sent
  bool acknowledge_ = false;
  uint32_t acknowledged_ = 0;  // tag
  int pulls_ = 0;              // unanswered or not sent to their end
  std::deque<Answer> answers_;
  bool ending_ = false;
  bool cancelled_ = false;  // nobody hears us any more
  bool finished_ = false;   // nothing may be started any more
  absl::Status end_;
  std::shared_ptr<BulkStream> self_;  // until gRPC is done
};

}  // namespace zeroshard::store
