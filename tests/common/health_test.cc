// The port for health checks: alive at once, ready when told, nothing else served there.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <vector>

#include "absl/time/clock.h"
#include "common/exit_codes.h"
#include "common/health_client.h"
#include "common/health_server.h"
#include "common/net_address.h"
#include "grpcpp/completion_queue.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(30);

TEST(Health, AProcessIsAliveFromTheStartAndReadyWhenItSaysSo) {
  const auto server = HealthServer::Start("127.0.0.1:0");
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string address = (*server)->address();
  const auto ready = [&] {
    return CheckHealth(address, HealthServer::kReadyService, kPatience).value();
  };
  EXPECT_TRUE(CheckHealth(address, "", kPatience).value());
  EXPECT_FALSE(ready());
  (*server)->SetReady(true);
  EXPECT_TRUE(ready());
  (*server)->SetReady(false);
  EXPECT_FALSE(ready());
  EXPECT_TRUE(CheckHealth(address, "", kPatience).value()) << "alive has nothing to do with ready";
}

TEST(Health, AnUnknownServiceIsNotFoundAndThoseThatThereAreAreNamed) {
  const auto server = HealthServer::Start("127.0.0.1:0");
  ASSERT_TRUE(server.ok()) << server.status();
  const auto answer = CheckHealth((*server)->address(), "raedy", kPatience);
  EXPECT_EQ(answer.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(answer.status().message()),
              AllOf(HasSubstr("raedy"), HasSubstr("\"ready\"")));
}

size_t OpenFiles() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                           std::filesystem::directory_iterator()));
}

// Without a bound one peer could take every file that the process may open.
TEST(Health, AFloodOfConnectionsTakesFewFilesAndPasses) {
  const auto server = HealthServer::Start("127.0.0.1:0");
  ASSERT_TRUE(server.ok()) << server.status();
  const auto address = ParseHostPort((*server)->address());
  ASSERT_TRUE(CheckHealth((*server)->address(), "", kPatience).value());
  constexpr size_t kFlood = 300;
  const size_t before = OpenFiles();
  std::vector<int> flood;
  for (size_t i = 0; i < kFlood; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ASSERT_GE(fd, 0);
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(address->port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
    flood.push_back(fd);
  }
  // Those that are refused are closed by the server: their ends can be read to the end.
  size_t refused = 0;
  for (const int fd : flood) {
    char byte = 0;
    timeval patience = {.tv_sec = 0, .tv_usec = 20'000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    const ssize_t got = recv(fd, &byte, 1, 0);
    if (got == 0 || (got < 0 && errno == ECONNRESET)) ++refused;
  }
  EXPECT_GE(refused, kFlood - 40);
  EXPECT_LE(OpenFiles(), before + kFlood + 50);
  for (const int fd : flood) close(fd);
  // Connections of one peer are let in at a rate again.
  const absl::Time deadline = absl::Now() + kPatience;
  bool answers = false;
  while (!answers && absl::Now() < deadline) {
    answers = CheckHealth((*server)->address(), "", absl::Seconds(2)).value_or(false);
  }
  EXPECT_TRUE(answers);
}

TEST(Health, ATakenPortAndAWrongAddressAreRefusedReadably) {
  const auto first = HealthServer::Start("127.0.0.1:0");
  ASSERT_TRUE(first.ok());
  const absl::Status taken = HealthServer::Start((*first)->address()).status();
  EXPECT_EQ(ExitCodeFor(taken), kExitUnavailable);
  EXPECT_THAT(std::string(taken.message()),
              HasSubstr("cannot listen on " + (*first)->address() + " for health checks: "));
  const absl::Status wrong = HealthServer::Start("7072").status();
  EXPECT_EQ(ExitCodeFor(wrong), kExitUsage);
  EXPECT_THAT(std::string(wrong.message()), AllOf(HasSubstr("--health-listen"), HasSubstr("7072")));
}

TEST(Health, NobodyThereIsUnavailableAndSilenceEndsByTheTimeout) {
  auto server = HealthServer::Start("127.0.0.1:0");
  ASSERT_TRUE(server.ok());
  const std::string address = (*server)->address();
  server->reset();
  const auto answer = CheckHealth(address, "", kPatience);
  EXPECT_EQ(answer.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(answer.status().message()),
              AllOf(HasSubstr(address), HasSubstr("--health-listen")));
  // A connection is made, and nobody reads from it.
  const int silent = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(at);
  ASSERT_EQ(bind(silent, reinterpret_cast<sockaddr*>(&at), length), 0);
  ASSERT_EQ(listen(silent, 1), 0);
  ASSERT_EQ(getsockname(silent, reinterpret_cast<sockaddr*>(&at), &length), 0);
  const HostPort silent_address{"127.0.0.1", ntohs(at.sin_port)};
  EXPECT_EQ(CheckHealth(silent_address.ToString(), "", absl::Milliseconds(300)).status().code(),
            absl::StatusCode::kUnavailable);
  close(silent);
  EXPECT_EQ(CheckHealth("127.0.0.1:0", "", kPatience).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Health, NothingElseIsServedThere) {
  const auto server = HealthServer::Start("127.0.0.1:0");
  ASSERT_TRUE(server.ok());
  grpc::GenericStub stub(
      grpc::CreateChannel((*server)->address(), grpc::InsecureChannelCredentials()));
  for (const char* method : {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                             "/zeroshard.v1.Jobs/List"}) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    grpc::CompletionQueue queue;
    const grpc::ByteBuffer request;
    const auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
    call->StartCall();
    grpc::ByteBuffer response;
    grpc::Status status;
    call->Finish(&response, &status, &queue);
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue.Next(&tag, &ok));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << method;
  }
}

TEST(Health, AMessageThatNoCheckNeedsIsRefused) {
  const auto server = HealthServer::Start("127.0.0.1:0");
  ASSERT_TRUE(server.ok());
  const auto answer = CheckHealth((*server)->address(), std::string(100000, 'x'), kPatience);
  EXPECT_EQ(answer.status().code(), absl::StatusCode::kResourceExhausted) << answer.status();
  EXPECT_TRUE(CheckHealth((*server)->address(), "", kPatience).value());
}

}  // namespace
}  // namespace zeroshard
