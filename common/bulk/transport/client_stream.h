// The asking side of one Bulk stream, on gRPC's callback interface: no call here blocks.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "common/bulk/transport/frame_buffer.h"
#include "grpcpp/channel.h"
#include "grpcpp/support/client_callback.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::bulk {

// A channel with a connection of its own, set up for frames of 1 MiB, protected as the process's
// security says.
std::shared_ptr<grpc::Channel> MakeBulkChannel(const std::string& address);

// A frame on its way out. The checksum is computed when it is sent, once for all that send it.
struct Outgoing {
  Header header;
  absl::Span<const char> payload;
  std::shared_ptr<const void> keep;                 // lives for as long as gRPC reads the payload
  std::shared_ptr<std::atomic<uint64_t>> checksum;  // 0: not known yet; else it, with bit 32 set
};

// Whether a stream offers its store shared memory for payloads. Where that fails, or the store is
// on another host, they travel in their frames; nothing else differs.
struct Sharing {
  bool wanted = true;
  int slots = 4;  // of kMaxPayload; more do not pass more, and leave the cache
  std::string folder = SharedRegion::kFolder;
};

// Thread-safe. Lives until its owner let go of it and gRPC is done with it.
class ClientStream final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                           public std::enable_shared_from_this<ClientStream> {
 public:
  struct Handler {
    // On gRPC's threads, one at a time and in order; the payload's checksum is right. An error
    // ends the stream with it. kError frames do not arrive here.
    std::function<absl::Status(const ReceivedFrame&)> on_frame;
    // A frame was handed to the transport. May be null.
    std::function<void(const Header&)> on_sent;
    // Once, after everything else: why it ended; never OK. Frames that were not sent are gone.
    std::function<void(const absl::Status&)> on_end;
  };

  // Connects and says hello; the store's kWelcome arrives as a frame. The connection is this
  // stream's own and ends with it.
  static std::shared_ptr<ClientStream> Open(const std::string& address, const v1::BulkHello& hello,
                                            Handler handler, const Sharing& sharing = {});

  // Sends after what was sent before. Ignored once the stream is ending. What is to lie in a slot
  // waits until one is free: until the store has answered something sent before.
  void Send(Outgoing frame);
  // Ends the stream; the first reason is on_end's.
  void Cancel(absl::Status reason);

 private:
  explicit ClientStream(Handler handler) : handler_(std::move(handler)) {}

  void WriteNext(std::unique_lock<std::mutex> lock);
  absl::Status TakeFrame(const grpc::ByteBuffer& message);
  absl::Status TakeWelcome(const ReceivedFrame& frame);
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  const Handler handler_;
  std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  grpc::ByteBuffer incoming_;
  grpc::ByteBuffer outgoing_;  // what the write under way reads
  Header sending_;

  std::mutex mutex_;
  std::deque<Outgoing> queue_;
  uint64_t generation_ = 0;
  bool welcomed_ = false;
  std::shared_ptr<SharedRegion> region_;  // offered; null again where the store did not map it
  bool shared_ = false;                   // it did
  bool room_ = false;                     // a kRoom frame is to be sent
  bool writing_ = false;
  bool closing_ = false;                // no further write may start
  absl::Status reason_;                 // of the end
  std::shared_ptr<ClientStream> self_;  // until gRPC is done
};

}  // namespace zeroshard::bulk
