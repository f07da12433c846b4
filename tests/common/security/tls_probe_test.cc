// Why a server cannot be spoken to, asked of real sockets.
#include "common/security/tls_probe.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/grpc_server.h"
#include "common/security/security.h"
#include "tests/common/security/certificates.h"
#include "tests/common/temp_folder.h"

namespace zeroshard::security {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Takes one connection and does what it is told with it, once it has heard something.
class Peer {
 public:
  explicit Peer(std::function<void(int fd)> answer) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(fd_, 1), 0);
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
    thread_ = std::thread([this, answer = std::move(answer)] {
      const int fd = accept(fd_, nullptr, nullptr);
      char byte;
      if (recv(fd, &byte, 1, 0) == 1) answer(fd);
      close(fd);
    });
  }
  ~Peer() {
    thread_.join();
    close(fd_);
  }
  const std::string& address() const { return address_; }

 private:
  const int fd_;
  std::string address_;
  std::thread thread_;
};

class TlsProbeTest : public testing::Test {
 protected:
  TlsProbeTest() : ca_(folder_ / "ca.crt") { WriteWhole(ca_, authority_.Pem()); }

  std::shared_ptr<const Security> Load(const TestAuthority& authority, Role role) {
    const Files files = authority.Issue(folder_ / std::string(NameOf(role)), UriOf(role));
    auto loaded = Security::Load({files.cert, files.key, ca_, "", false}, role);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return *loaded;
  }
  std::string Ask(const std::string& address, absl::Duration budget = absl::Seconds(20)) {
    return TlsTrouble(*Load(authority_, Role::kWorker), address, Role::kCoordinator, budget);
  }

  TempFolder folder_;
  TestAuthority authority_{"one"};
  std::string ca_;
};

// As fast as it is read: records of handshakes that ask for another one, which OpenSSL skips.
TEST_F(TlsProbeTest, APeerThatNeverStopsSendingIsLeft) {
  Peer peer([](int fd) {
    const std::string record = std::string("\x16\x03\x03\x40\x00", 5) + std::string(16384, '\0');
    while (send(fd, record.data(), record.size(), MSG_NOSIGNAL) > 0) {
    }
  });
  const absl::Time start = absl::Now();
  EXPECT_THAT(Ask(peer.address()), IsEmpty());
  EXPECT_LT(absl::Now() - start, absl::Seconds(5)) << "long before the time is over";
}

TEST_F(TlsProbeTest, APeerThatDripsHasTheBudget) {
  Peer peer([](int fd) {
    const std::string record("\x16\x03\x03\x40\x00", 5);
    if (send(fd, record.data(), record.size(), MSG_NOSIGNAL) <= 0) return;
    while (send(fd, "\0", 1, MSG_NOSIGNAL) > 0) absl::SleepFor(absl::Milliseconds(10));
  });
  const absl::Time start = absl::Now();
  EXPECT_THAT(Ask(peer.address(), absl::Milliseconds(300)), IsEmpty());
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

TEST_F(TlsProbeTest, WhoDoesNotSpeakTlsIsSaidToBeSo) {
  Peer peer([](int fd) { send(fd, "HTTP/1.1 400 Bad Request\r\n\r\n", 28, MSG_NOSIGNAL); });
  EXPECT_THAT(Ask(peer.address()), HasSubstr("does not speak TLS"));
}

TEST_F(TlsProbeTest, AServerIsJudgedByItsCertificateAndByWhatItThinksOfOurs) {
  const auto serve = [&](const std::shared_ptr<const Security>& security) {
    GrpcServer::Options options;
    options.listen = "127.0.0.1:0";
    options.security = security;
    return *GrpcServer::Start(options);
  };
  const auto good = serve(Load(authority_, Role::kCoordinator));
  EXPECT_THAT(Ask(good->address()), IsEmpty());
  EXPECT_THAT(TlsTrouble(*Security::Load({}, Role::kWorker).value(), good->address(),
                         Role::kCoordinator, absl::Seconds(20)),
              HasSubstr("speaks TLS, and was called without"));
  const auto worker = serve(Load(authority_, Role::kStore));
  EXPECT_THAT(Ask(worker->address()), HasSubstr("is for"));

  // A server of another authority, which knows ours or does not.
  const TestAuthority other("two");
  const std::string both = folder_ / "both.crt", ours = ca_;
  WriteWhole(both, authority_.Pem() + other.Pem());
  ca_ = both;
  const auto strange = serve(Load(other, Role::kCoordinator));
  ca_ = ours;
  EXPECT_THAT(Ask(strange->address()), HasSubstr("does not follow from --tls-ca"));
  const std::string theirs = folder_ / "theirs.crt";
  WriteWhole(theirs, other.Pem());
  ca_ = theirs;
  const auto stranger = serve(Load(other, Role::kCoordinator));
  ca_ = both;
  EXPECT_THAT(Ask(stranger->address()), AllOf(HasSubstr("refuses --tls-cert"), HasSubstr(".crt")));
}

}  // namespace
}  // namespace zeroshard::security
