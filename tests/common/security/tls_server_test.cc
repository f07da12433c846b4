// A real server with TLS: who gets in, who may call what, and what happens when files change.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/grpc_log.h"
#include "common/grpc_server.h"
#include "common/security/certificate.h"
#include "common/security/refusals.h"
#include "common/security/rpc_roles.h"
#include "common/security/security.h"
#include "grpcpp/completion_queue.h"
#include "tests/common/security/certificates.h"
#include "tests/common/temp_folder.h"

namespace zeroshard::security {
namespace {

using ::testing::HasSubstr;

constexpr char kHealth[] = "/grpc.health.v1.Health/Check";
constexpr char kList[] = "/zeroshard.v1.Jobs/List";

struct Call {
  std::string method;
  std::string body = {};
  std::string authorization = {};
  std::vector<std::pair<std::string, std::string>> headers = {};
  int seconds = 20;
};

// Calls a method by name with raw bytes.
grpc::Status Ask(const std::shared_ptr<grpc::Channel>& channel, const Call& call) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(call.seconds));
  if (!call.authorization.empty()) context.AddMetadata("authorization", call.authorization);
  for (const auto& [key, value] : call.headers) context.AddMetadata(key, value);
  grpc::CompletionQueue queue;
  grpc::Slice slice(call.body);
  grpc::ByteBuffer in(&slice, 1);
  auto reader = stub.PrepareUnaryCall(&context, call.method, in, &queue);
  reader->StartCall();
  grpc::ByteBuffer out;
  grpc::Status status;
  reader->Finish(&out, &status, &queue);
  void* tag = nullptr;
  bool ok = false;
  EXPECT_TRUE(queue.Next(&tag, &ok));
  return status;
}

std::shared_ptr<grpc::Channel> Connect(const Security& security, const std::string& address,
                                       Role role = Role::kCoordinator) {
  grpc::ChannelArguments args;
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, security.ChannelCredentials(role), args);
}

class TlsServerTest : public testing::Test {
 protected:
  TlsServerTest() : ca_(folder_ / "ca.crt") { WriteWhole(ca_, authority_.Pem()); }

  SecurityOptions Options(const std::string& name, const Wanted& wanted) {
    const Files files = authority_.Issue(folder_ / name, wanted);
    return {files.cert, files.key, ca_, "", false};
  }
  std::shared_ptr<const Security> Load(const std::string& name, Role role, Wanted wanted = {}) {
    if (wanted.uris.empty()) wanted.uris = {UriOf(role)};
    auto loaded = Security::Load(Options(name, wanted), role);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return *loaded;
  }
  void Serve(GrpcServer::Options options) {
    options.listen = "127.0.0.1:0";
    if (options.security == nullptr) options.security = Load("coordinator", Role::kCoordinator);
    auto started = GrpcServer::Start(options);
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
  }
  grpc::Status AskAs(const Security& security, const Call& call) {
    return Ask(Connect(security, server_->address()), call);
  }

  TempFolder folder_;
  TestAuthority authority_{"one"};
  std::string ca_;
  std::unique_ptr<GrpcServer> server_;
};

TEST_F(TlsServerTest, ServesWhomItKnows) {
  Serve({});
  const grpc::Status status = AskAs(*Load("client", Role::kClient), {kHealth});
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(TlsServerTest, EveryMethodIsForItsRolesAndForNobodyElse) {
  Serve({});
  for (const Role role : kAllRoles) {
    const auto channel =
        Connect(*Load(std::string(NameOf(role)) + "-peer", role), server_->address());
    for (const RpcRule& rule : RpcRules()) {
      // What is allowed gets as far as the server, which has health and reflection only.
      const bool allowed =
          std::find(rule.roles.begin(), rule.roles.end(), role) != rule.roles.end();
      const grpc::Status status =
          Ask(channel, {.method = std::string(rule.method), .seconds = 1});  // some are streams
      EXPECT_EQ(status.error_code() == grpc::StatusCode::PERMISSION_DENIED, !allowed)
          << NameOf(role) << " " << rule.method << ": " << status.error_message();
      if (!allowed) {
        EXPECT_THAT(status.error_message(), HasSubstr(std::string(NameOf(role))));
        EXPECT_THAT(status.error_message(), HasSubstr(std::string(rule.method)));
      }
    }
    EXPECT_EQ(Ask(channel, {"/zeroshard.v1.Jobs/Destroy"}).error_code(),
              grpc::StatusCode::PERMISSION_DENIED);
  }
}

TEST_F(TlsServerTest, ACertificateWithoutARoleMayDoNothing) {
  Serve({});
  const uint64_t before = Refused(Refusal::kUnauthenticated);
  // A client's own check would not let it start: this one is not ours.
  const Files other = authority_.Issue(folder_ / "other", "spiffe://elsewhere/client");
  const auto credentials =
      grpc::SslCredentials({authority_.Pem(), ReadPem(other.key)->text, ReadPem(other.cert)->text});
  const grpc::Status status = Ask(grpc::CreateChannel(server_->address(), credentials), {kHealth});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << status.error_message();
  EXPECT_EQ(Refused(Refusal::kUnauthenticated), before + 1);
}

TEST_F(TlsServerTest, AnotherAuthoritysCertificateIsRefusedByBothSides) {
  Serve({});
  const TestAuthority stranger("two");
  const std::string both = folder_ / "both.crt";
  WriteWhole(both, authority_.Pem() + stranger.Pem());
  const Files files = stranger.Issue(folder_ / "stranger", UriOf(Role::kClient));
  // Trusts the server, is not trusted by it.
  const auto client = Security::Load({files.cert, files.key, both, "", false}, Role::kClient);
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ(AskAs(**client, {kHealth}).error_code(), grpc::StatusCode::UNAVAILABLE);
  // Does not trust the server.
  const std::string theirs = folder_ / "theirs.crt";
  WriteWhole(theirs, stranger.Pem());
  const auto wary = Security::Load({files.cert, files.key, theirs, "", false}, Role::kClient);
  ASSERT_TRUE(wary.ok()) << wary.status();
  const grpc::Status status = AskAs(**wary, {kHealth});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("handshake"));
}

TEST_F(TlsServerTest, AnExpiredCertificateIsRefused) {
  Serve({});
  const auto client =
      Load("short", Role::kClient, {.from = -absl::Hours(1), .to = absl::Seconds(2)});
  absl::SleepFor(absl::Seconds(3));
  EXPECT_EQ(AskAs(*client, {kHealth}).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(TlsServerTest, NoCertificateAndNoTlsAreRefused) {
  Serve({});
  const auto plain = grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials());
  EXPECT_EQ(Ask(plain, {kHealth}).error_code(), grpc::StatusCode::UNAVAILABLE);
  const std::string tokens = folder_ / "tokens";
  WriteWhole(tokens, "a-token-that-is-known\n");
  const auto client = Security::Load({"", "", ca_, tokens, false}, Role::kClient);
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ(AskAs(**client, {kHealth, "", (*client)->Authorization()}).error_code(),
            grpc::StatusCode::UNAVAILABLE)
      << "this server takes no tokens";
}

TEST_F(TlsServerTest, AServerOfAnotherHostOrRoleIsNotSpokenTo) {
  Serve({.security = Load("elsewhere", Role::kCoordinator, {.hosts = {"DNS:elsewhere.example"}})});
  const auto client = Load("client", Role::kClient);
  grpc::Status status = AskAs(*client, {kHealth});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("not for the host that was called"));
  Serve({.security = Load("store", Role::kStore)});
  status = AskAs(*client, {kHealth});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("is for store, wanted coordinator"));
  EXPECT_TRUE(Ask(Connect(*client, server_->address(), Role::kStore), {kHealth}).ok());
}

TEST_F(TlsServerTest, ATokenMakesAClientAndNothingElse) {
  const std::string tokens = folder_ / "tokens";
  WriteWhole(tokens, "a-token-that-is-known\n");
  SecurityOptions options = Options("coordinator", {.uris = {UriOf(Role::kCoordinator)}});
  options.token_file = tokens;
  const auto server = Security::Load(options, Role::kCoordinator);
  ASSERT_TRUE(server.ok()) << server.status();
  Serve({.security = *server});
  const auto client = Security::Load({"", "", ca_, tokens, false}, Role::kClient);
  ASSERT_TRUE(client.ok()) << client.status();
  const auto channel = Connect(**client, server_->address());
  const std::string good = (*client)->Authorization();
  EXPECT_EQ(good, "Bearer a-token-that-is-known");
  EXPECT_TRUE(Ask(channel, {kHealth, "", good}).ok());
  EXPECT_EQ(Ask(channel, {"/zeroshard.v1.Cluster/Barrier", "", good}).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  for (const std::string& wrong :
       {std::string(), std::string("Bearer"), good + "x", std::string("a-token-that-is-known"),
        std::string("Basic a-token-that-is-known"), std::string("Bearer ")}) {
    EXPECT_EQ(Ask(channel, {kHealth, "", wrong}).error_code(), grpc::StatusCode::UNAUTHENTICATED)
        << wrong;
  }
  // A worker's token does not make it less of a worker; a certificate goes on working beside.
  const auto worker = Connect(*Load("worker", Role::kWorker), server_->address());
  EXPECT_NE(Ask(worker, {"/zeroshard.v1.Cluster/Barrier"}).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Ask(worker, {kList}).error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(TlsServerTest, NewFilesTakeHoldWithoutARestart) {
  Serve({.connection_age = absl::Seconds(1), .connection_grace = absl::Seconds(1)});
  const auto client = Load("client", Role::kClient);
  const auto lasting = Connect(*client, server_->address());
  ASSERT_TRUE(Ask(lasting, {kHealth}).ok());
  // Everything moves to another authority; nothing is started again.
  const TestAuthority next("two");
  WriteWhole(ca_, next.Pem());
  next.Issue(folder_ / "coordinator", UriOf(Role::kCoordinator));
  next.Issue(folder_ / "client", UriOf(Role::kClient));
  absl::SleepFor(absl::Seconds(Security::kRefreshSeconds + 3));
  EXPECT_TRUE(Ask(lasting, {kHealth}).ok()) << "the channel connects again by itself";
  // One that the old authority signed is nobody now, also on a connection that it had.
  const Files old = authority_.Issue(folder_ / "old", UriOf(Role::kClient));
  const std::string old_ca = folder_ / "old_ca.crt";
  WriteWhole(old_ca, authority_.Pem());
  const auto stale = Security::Load({old.cert, old.key, old_ca, "", false}, Role::kClient);
  ASSERT_TRUE(stale.ok()) << stale.status();
  EXPECT_EQ(AskAs(**stale, {kHealth}).error_code(), grpc::StatusCode::UNAVAILABLE);
}

// A socket from another address of this host, which the kernel has any number of.
int ConnectFrom(const char* from, int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  inet_pton(AF_INET, from, &address.sin_addr);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
  address.sin_port = htons(static_cast<uint16_t>(port));
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

TEST_F(TlsServerTest, ABadFileLocksNobodyOutAndTheNextGoodOneTakesHold) {
  Serve({});
  const auto client = Load("client", Role::kClient);
  // The client of a cluster that has moved on: it knows the new authority alone.
  const TestAuthority next("two");
  const Files moved = next.Issue(folder_ / "moved", UriOf(Role::kClient));
  const std::string moved_ca = folder_ / "moved_ca.crt";
  WriteWhole(moved_ca, next.Pem());
  const auto mover = Security::Load({moved.cert, moved.key, moved_ca, "", false}, Role::kClient);
  ASSERT_TRUE(mover.ok()) << mover.status();

  const std::string cert = folder_ / "coordinator.crt";
  testing::internal::CaptureStderr();
  WriteWhole(cert, "-----BEGIN CERTIFICATE-----\nhalf of o");
  const absl::Time until = absl::Now() + absl::Seconds(3 * Security::kRefreshSeconds);
  while (absl::Now() < until) {
    const grpc::Status status = AskAs(*client, {kHealth});  // a new connection each time
    ASSERT_TRUE(status.ok()) << status.error_message();
    absl::SleepFor(absl::Milliseconds(100));
  }
  EXPECT_EQ(AskAs(**mover, {kHealth}).error_code(), grpc::StatusCode::UNAVAILABLE);
  const Files good = next.Issue(folder_ / "good", UriOf(Role::kCoordinator));
  const std::string good_key = ReadPem(good.key)->text, good_cert = ReadPem(good.cert)->text;
  WriteWhole(ca_, authority_.Pem() + next.Pem());
  WriteWhole(folder_ / "coordinator.key", good_key);
  WriteWhole(cert, good_cert);
  grpc::Status status;
  for (const absl::Time end = absl::Now() + absl::Seconds(30); absl::Now() < end;) {
    status = AskAs(**mover, {kHealth});
    if (status.ok()) break;
    absl::SleepFor(absl::Milliseconds(100));
  }
  EXPECT_TRUE(status.ok()) << status.error_message();
  const std::string said = testing::internal::GetCapturedStderr();
  const size_t first = said.find(absl::StrCat("TLS: ", cert, ": block 1 in it is no certificate"));
  EXPECT_NE(first, std::string::npos) << said;
  EXPECT_EQ(said.find(absl::StrCat("TLS: ", cert), first + 1), std::string::npos) << said;
}

TEST(LineBudgetTest, SoManyAtOnceThenSoManyASecondAndWhatWasLeftOutIsKnown) {
  LineBudget budget(3, 0.5);
  absl::Duration now = absl::Hours(7);
  uint64_t left_out = 0;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(budget.Take(now, &left_out));
  EXPECT_EQ(left_out, 0u);
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(budget.Take(now, &left_out));
  now += absl::Seconds(2);
  EXPECT_TRUE(budget.Take(now, &left_out));
  EXPECT_EQ(left_out, 100u);
  EXPECT_FALSE(budget.Take(now, &left_out));
  now += absl::Hours(1);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(budget.Take(now, &left_out));
  EXPECT_EQ(left_out, 0u);
  EXPECT_FALSE(budget.Take(now, &left_out));
}

TEST_F(TlsServerTest, HandshakesThatFailAreCountedAndDoNotFillTheLog) {
  Serve({});
  const TestAuthority stranger("two");
  const Files files = stranger.Issue(folder_ / "strange", UriOf(Role::kClient));
  const std::string ca = folder_ / "strange_ca.crt";
  WriteWhole(ca, stranger.Pem() + authority_.Pem());
  const auto strange = Security::Load({files.cert, files.key, ca, "", false}, Role::kClient);
  ASSERT_TRUE(strange.ok()) << strange.status();
  const uint64_t before = Refused(Refusal::kHandshake);
  testing::internal::CaptureStderr();
  EXPECT_EQ(AskAs(**strange, {.method = kHealth, .seconds = 3}).ok(), false);
  // The client may know of it before the server has counted it.
  const auto refused = [&] { return Refused(Refusal::kHandshake) - before; };
  const auto await = [&](uint64_t wanted) {
    for (int i = 0; i < 1200 && refused() < wanted; ++i) absl::SleepFor(absl::Milliseconds(50));
    EXPECT_GE(refused(), wanted);
  };
  await(1);
  // No TLS at all, 200 times.
  constexpr int kTimes = 200;
  for (int i = 0; i < kTimes; ++i) {
    const int fd = ConnectFrom("127.0.0.4", server_->port());
    EXPECT_EQ(send(fd, "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL), 18);
    char bytes[64];
    while (recv(fd, bytes, sizeof(bytes), 0) > 0) {
    }
    close(fd);
  }
  await(1 + kTimes);
  const std::string said = testing::internal::GetCapturedStderr();
  // What is said is bounded in a process, where other tests may have been.
  if (before == 0) {
    EXPECT_THAT(said, HasSubstr("refused a connection whose handshake failed: UNKNOWN:Tls "
                                "handshake failed: SSL_ERROR_SSL"));
  }
  const auto lines = std::count(said.begin(), said.end(), '\n');
  EXPECT_LE(lines, 60) << said;
  EXPECT_TRUE(AskAs(*Load("client", Role::kClient), {kHealth}).ok());
}

TEST_F(TlsServerTest, WhatIsTooLongIsRefusedAndTheServerGoesOn) {
  Serve({.max_message_bytes = 1 << 20});
  const auto client = Load("client", Role::kClient);
  const auto channel = Connect(*client, server_->address());
  EXPECT_EQ(Ask(channel, {kHealth, std::string(64 << 20, 'x')}).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Ask(channel, {.method = kHealth, .headers = {{"x", std::string(64 << 10, 'x')}}})
                .error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  // A connection over which too much came may be closed; the next one is as good.
  const auto again = [&](const Call& call) {
    grpc::Status status;
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    do {
      status = AskAs(*client, call);
    } while (status.error_code() == grpc::StatusCode::UNAVAILABLE && absl::Now() < deadline);
    return status;
  };
  const grpc::Status long_method = again({"/a/" + std::string(5000, 'b')});
  EXPECT_EQ(long_method.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_LT(long_method.error_message().size(), 400u);
  EXPECT_TRUE(again({kHealth}).ok());
}

// Whether the server holds the connection: it says nothing before it is spoken to.
bool IsHeld(int fd) {
  timeval patience = {0, 200'000};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  char byte;
  const ssize_t got = recv(fd, &byte, 1, MSG_PEEK);
  return got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));
}

TEST_F(TlsServerTest, OnePeersConnectionsKeepNobodyElseOut) {
  Serve({.connections = {.of_peer = 8}});
  const uint64_t before = Refused(Refusal::kFlood);
  std::vector<int> flood;
  for (int i = 0; i < 50; ++i) flood.push_back(ConnectFrom("127.0.0.2", server_->port()));
  int held = 0;
  for (const int fd : flood) held += IsHeld(fd) ? 1 : 0;
  EXPECT_EQ(held, 8);
  EXPECT_EQ(Refused(Refusal::kFlood), before + 42);
  const auto client = Load("client", Role::kClient);
  EXPECT_TRUE(AskAs(*client, {kHealth}).ok());
  for (const int fd : flood) close(fd);
  // Once gRPC has noticed, the places are free again.
  bool again = false;
  for (int i = 0; i < 1200 && !again; ++i) {
    const int fd = ConnectFrom("127.0.0.2", server_->port());
    again = IsHeld(fd);
    close(fd);
    if (!again) absl::SleepFor(absl::Milliseconds(50));
  }
  EXPECT_TRUE(again);
}

TEST_F(TlsServerTest, AConnectionThatSaysNothingIsEnded) {
  Serve({});
  const int fd = ConnectFrom("127.0.0.3", server_->port());
  timeval patience = {30, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  const absl::Time start = absl::Now();
  char byte;
  EXPECT_LE(recv(fd, &byte, 1, 0), 0);
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  close(fd);
}

}  // namespace
}  // namespace zeroshard::security
