// Clusters with certificates: they train, keep training while every certificate is replaced and
// while somebody floods them, and let nobody in who is not what they say.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/net_address.h"
#include "tests/cluster/protected_fixture.h"

namespace zeroshard::cluster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The files are looked at every 2 s, connections to the coordinator end after at most 3.
constexpr absl::Duration kTakesHold = absl::Seconds(6);

// Ranks are told in turns that depend on when.
std::vector<std::string> SortedLines(const std::string& text) {
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  std::sort(lines.begin(), lines.end());
  return lines;
}

class TlsTest : public ProtectedTest {
 protected:
  void ExpectUndisturbed() {
    const auto status = Status();
    ASSERT_TRUE(status.is_object());
    EXPECT_EQ(status["state"], "RUNNING") << status.dump();
    EXPECT_EQ(status["generation"], 1) << status.dump();
    EXPECT_EQ(status["steps_lost"], 0) << status.dump();
  }
};

TEST_F(TlsTest, AJobTrainsOnWhileEveryCertificateAndTheAuthorityAreReplaced) {
  ASSERT_NO_FATAL_FAILURE(StartCluster());
  ASSERT_NO_FATAL_FAILURE(SubmitEndless());
  constexpr char kExpiry[] = "zeroshard_tls_certificate_expiry_timestamp_seconds";
  const double expiry = Metric("worker-0", kExpiry);
  EXPECT_GT(expiry, 0);
  // Connections end while these go on.
  std::vector<std::string> logs = {program_,   "logs",          "small",
                                   "--follow", "--coordinator", AddressOf("w", "coordinator")};
  for (const std::string& option : TlsOptions("client")) logs.push_back(option);
  Process follow(logs, folder_ + "/follow");

  const security::TestAuthority next("two");
  security::WriteWhole(ca_, authority_.Pem() + next.Pem());
  absl::SleepFor(kTakesHold);
  security::Wanted later;
  later.to = absl::Hours(9);
  for (const auto& [name, role] :
       std::vector<std::pair<std::string, std::string>>{{"coordinator", "coordinator"},
                                                        {"worker-0", "worker/worker-0"},
                                                        {"worker-1", "worker/worker-1"},
                                                        {"store-0", "store"},
                                                        {"client", "client"}}) {
    later.uris = {"spiffe://zeroshard/" + role};
    next.Issue(folder_ + "/" + name, later);
  }
  absl::SleepFor(kTakesHold);
  security::WriteWhole(ca_, next.Pem());
  absl::SleepFor(kTakesHold);

  EXPECT_TRUE(GoesOn(5)) << "the job stands still";
  ExpectUndisturbed();
  EXPECT_GT(Metric("worker-0", kExpiry), expiry + 3600);
  // A member that starts now is taken with a new certificate alone.
  Issue(authority_, "worker-2", "worker/worker-2");
  security::WriteWhole(folder_ + "/old.crt", authority_.Pem());
  const Process* late =
      Start("worker-2", "zeroshard-worker",
            {"--tls-cert", folder_ + "/worker-2.crt", "--tls-key", folder_ + "/worker-2.key",
             "--tls-ca", folder_ + "/old.crt", "--connect-timeout", "5"});
  EXPECT_EQ(daemons_["worker-2"]->Wait(kPatience), 3) << late->Err();
  const auto before = SortedLines(Client({"logs", "small"})->Out());
  EXPECT_EQ(Client({"cancel", "small"})->Wait(absl::Seconds(1)), 0);
  EXPECT_EQ(follow.Wait(kPatience), 0) << follow.Err();
  // Nothing is lost or told twice; a rank's very last line may come after the job's end.
  const auto followed = SortedLines(follow.Out());
  EXPECT_TRUE(std::includes(followed.begin(), followed.end(), before.begin(), before.end()));
  const auto after = SortedLines(Client({"logs", "small"})->Out());
  EXPECT_TRUE(std::includes(after.begin(), after.end(), followed.begin(), followed.end()));
}

TEST_F(TlsTest, NobodyIsLetInWhoIsNotWhatTheySay) {
  ASSERT_NO_FATAL_FAILURE(StartCluster());
  // Another's name.
  Process* other = Start("worker-9", "zeroshard-worker",
                         {"--tls-cert", folder_ + "/worker-0.crt", "--tls-key",
                          folder_ + "/worker-0.key", "--tls-ca", ca_, "--connect-timeout", "4"});
  EXPECT_EQ(other->Wait(kPatience), 4);
  EXPECT_THAT(other->Err(), HasSubstr("its certificate is for worker (worker-0)"));
  EXPECT_GE(Metric("coordinator", "zeroshard_rpc_refused_total{reason=\"role\"}"), 1);
  // Another's role: said before anything is opened.
  Process* store = Start("store-9", "zeroshard-store", TlsOptions("worker-0"));
  EXPECT_EQ(store->Wait(kPatience), 2);
  EXPECT_THAT(store->Err(),
              AllOf(HasSubstr("worker-0.crt"), HasSubstr("spiffe://zeroshard/store")));
  // Without TLS, and with a token alone.
  const std::string at = AddressOf("w", "coordinator");
  const auto bare = Run({"list", "--coordinator", at});
  EXPECT_EQ(bare->Wait(absl::Seconds(1)), 3);
  const std::string said = bare->Err();
  EXPECT_THAT(said, AllOf(HasSubstr(at + " speaks TLS"), HasSubstr("give --tls-ca")));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  const auto known =
      Run({"list", "--coordinator", at, "--tls-ca", ca_, "--token-file", folder_ + "/tokens"});
  EXPECT_EQ(known->Wait(absl::Seconds(1)), 0) << known->Err();
  security::WriteWhole(folder_ + "/guess", "a-token-that-was-guessed\n");
  const auto guess =
      Run({"list", "--coordinator", at, "--tls-ca", ca_, "--token-file", folder_ + "/guess"});
  EXPECT_EQ(guess->Wait(absl::Seconds(1)), 1);
  EXPECT_THAT(guess->Err(), HasSubstr("the caller is unknown"));
}

TEST_F(TlsTest, WithoutProtectionNothingLeavesThisHost) {
  for (const std::string program :
       {"zeroshard-coordinator", "zeroshard-worker", "zeroshard-store"}) {
    Process refused({Program(program), "--listen", "0.0.0.0:0", "--metrics-listen", "127.0.0.1:0"},
                    folder_ + "/" + program);
    EXPECT_EQ(refused.Wait(kPatience), 2) << program;
    EXPECT_THAT(refused.Err(), AllOf(HasSubstr("--listen 0.0.0.0:0"), HasSubstr("--insecure"),
                                     HasSubstr("--tls-cert")));
  }
  Process worker({Program("zeroshard-worker"), "--coordinator", "192.0.2.1:7070"},
                 folder_ + "/far");
  EXPECT_EQ(worker.Wait(kPatience), 2);
  EXPECT_THAT(worker.Err(), HasSubstr("--coordinator 192.0.2.1:7070"));
  const auto client = Run({"list", "--coordinator", "192.0.2.1:7070"});
  EXPECT_EQ(client->Wait(absl::Seconds(1)), 2);
  EXPECT_THAT(client->Err(), HasSubstr("--insecure"));
}

// Sockets from another address of this host, most of which are refused.
class Flood {
 public:
  explicit Flood(const std::string& address) : port_(ParseHostPort(address)->port) {}
  ~Flood() {
    for (const int fd : held_) close(fd);
  }
  void Add(size_t count, size_t keep) {
    for (size_t i = 0; i < count; ++i) {
      const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
      if (fd < 0) break;
      sockaddr_in address = {};
      address.sin_family = AF_INET;
      inet_pton(AF_INET, "127.0.0.2", &address.sin_addr);
      bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address));
      inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
      address.sin_port = htons(static_cast<uint16_t>(port_));
      connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address));
      // The beginning of a handshake: something to do for the server.
      send(fd, "\x16\x03\x01", 3, MSG_NOSIGNAL);
      held_.push_back(fd);
    }
    while (held_.size() > keep) {
      close(held_.front());
      held_.erase(held_.begin());
    }
  }

 private:
  const int port_;
  std::vector<int> held_;
};

TEST_F(TlsTest, AFloodOfConnectionsFromOneAddressDoesNotStopAJob) {
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  ASSERT_NO_FATAL_FAILURE(StartCluster());
  ASSERT_NO_FATAL_FAILURE(SubmitEndless());
  Flood coordinator(AddressOf("w", "coordinator"));
  Flood store(AddressOf("w", "store-0"));
  const size_t before = History("w").size();
  const absl::Time until = absl::Now() + absl::Seconds(8);
  while (absl::Now() < until) {
    coordinator.Add(200, 1500);
    store.Add(200, 1500);
    absl::SleepFor(absl::Milliseconds(50));
  }
  EXPECT_GT(History("w").size(), before + 3) << "no step was done during the flood";
  // With the flood still there: others come in, members reconnect (every 2 s), the job goes on.
  ExpectUndisturbed();
  EXPECT_TRUE(GoesOn(5));
  for (const std::string daemon : {"coordinator", "store-0"}) {
    EXPECT_GT(Metric(daemon, "zeroshard_rpc_refused_total{reason=\"flood\"}"), 100) << daemon;
  }
  EXPECT_EQ(Client({"cancel", "small"})->Wait(absl::Seconds(1)), 0);
}

}  // namespace
}  // namespace zeroshard::cluster
