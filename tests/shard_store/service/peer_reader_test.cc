// The reader of another store's chunks, over sockets that behave badly.
#include "shard_store/service/peer_reader.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace zeroshard::store {
namespace {

using testing::HasSubstr;

// A port of this host that takes connections and answers nothing; closed: one that nobody has.
class SilentPort {
 public:
  SilentPort() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(socket_, 8), 0);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
  }
  ~SilentPort() { Close(); }
  void Close() {
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
  }
  v1::StoreMap::Store Peer() const {
    v1::StoreMap::Store peer;
    peer.set_member("store-7");
    peer.set_address(absl::StrCat("127.0.0.1:", port_));
    return peer;
  }

 private:
  int socket_;
  uint16_t port_ = 0;
};

absl::Status ReadSome(PeerReader* reader) {
  std::vector<float> values(64);
  return reader->Read({}, 3, StateKind::kMaster, 0, absl::MakeSpan(values));
}

TEST(PeerReaderTest, CancelEndsAReadThatNobodyAnswersAndEveryOneAfterIt) {
  SilentPort port;
  auto reader = ConnectPeer(port.Peer(), {}, absl::Minutes(5));
  ASSERT_TRUE(reader.ok()) << reader.status();
  std::future<absl::Status> read =
      std::async(std::launch::async, [&] { return ReadSome(reader->get()); });
  EXPECT_EQ(read.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  (*reader)->Cancel();
  ASSERT_EQ(read.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  const absl::Status status = read.get();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("store-7"));
  EXPECT_EQ(ReadSome(reader->get()).code(), absl::StatusCode::kCancelled);
}

TEST(PeerReaderTest, ASilenceEndsAReadNamingTheStore) {
  SilentPort port;
  auto reader = ConnectPeer(port.Peer(), {}, absl::Milliseconds(100));
  ASSERT_TRUE(reader.ok()) << reader.status();
  const absl::Status status = ReadSome(reader->get());
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(port.Peer().address()));
}

TEST(PeerReaderTest, AStoreThatIsNotThereIsUnavailable) {
  SilentPort port;
  port.Close();
  auto reader = ConnectPeer(port.Peer(), {}, absl::Minutes(5));
  ASSERT_TRUE(reader.ok()) << reader.status();
  const absl::Status status = ReadSome(reader->get());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("store-7"));
}

}  // namespace
}  // namespace zeroshard::store
