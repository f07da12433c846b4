// A taken port is refused with its address, for gRPC and for metrics; health and reflection.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "common/exit_codes.h"
#include "common/grpc_server.h"
#include "common/metrics_server.h"
#include "common/net_address.h"
#include "grpcpp/completion_queue.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(HostPort, IsReadAndWritten) {
  const auto address = ParseHostPort("[::1]:0");
  ASSERT_TRUE(address.ok());
  EXPECT_EQ(address->host, "::1");
  EXPECT_EQ(address->port, 0);
  EXPECT_EQ(address->ToString(), "[::1]:0");
  EXPECT_EQ(ParseHostPort("my-host:65535")->ToString(), "my-host:65535");
  for (const char* text :
       {"", "host", ":1", "host:", "host:x", "host:-1", "host:65536", "::1:5", "[::1:5", "a:1:2"}) {
    const auto refused = ParseHostPort(text);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("wanted host:port")) << text;
  }
}

// Expects that a second listener on `address` was refused, with the address and the way out.
void ExpectTaken(const absl::Status& status, const std::string& address) {
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(address), HasSubstr("Address already in use"), HasSubstr("port 0")));
  EXPECT_EQ(ExitCodeFor(status), kExitUnavailable);
}

TEST(GrpcServer, BindsAFreePortAndASecondServerOnItIsRefused) {
  auto first = GrpcServer::Start({"127.0.0.1:0", {}});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_GT((*first)->port(), 0);
  EXPECT_EQ((*first)->address(), absl::StrCat("127.0.0.1:", (*first)->port()));
  ExpectTaken(GrpcServer::Start({(*first)->address(), {}}).status(), (*first)->address());
}

TEST(GrpcServer, AHostNameOfWhichOneAddressIsTakenIsRefused) {
  auto first = GrpcServer::Start({"127.0.0.1:0", {}});
  ASSERT_TRUE(first.ok());
  const std::string name = absl::StrCat("localhost:", (*first)->port());
  ExpectTaken(GrpcServer::Start({name, {}}).status(), name);
}

TEST(GrpcServer, APortIsFreeAgainAfterTheServer) {
  auto first = GrpcServer::Start({"127.0.0.1:0", {}});
  ASSERT_TRUE(first.ok());
  const std::string address = (*first)->address();
  first->reset();
  EXPECT_TRUE(ProbeListen(*ParseHostPort(address), "gRPC").ok());
}

TEST(GrpcServer, AnAddressOfAnotherMachineIsRefusedReadably) {
  const auto server = GrpcServer::Start({"192.0.2.1:0", {}});  // TEST-NET-1
  EXPECT_EQ(server.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(server.status().message()), HasSubstr("192.0.2.1"));
}

// Calls a method by name with raw bytes.
grpc::Status CallRaw(const std::string& address, const std::string& method,
                     const std::string& request, std::string* response) {
  grpc::GenericStub stub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  grpc::CompletionQueue queue;
  grpc::Slice slice(request);
  grpc::ByteBuffer in(&slice, 1);
  auto call = stub.PrepareUnaryCall(&context, method, in, &queue);
  call->StartCall();
  grpc::ByteBuffer out;
  grpc::Status status;
  call->Finish(&out, &status, &queue);
  void* tag = nullptr;
  bool ok = false;
  EXPECT_TRUE(queue.Next(&tag, &ok));
  std::vector<grpc::Slice> slices;
  out.Dump(&slices);
  for (const grpc::Slice& part : slices) {
    response->append(reinterpret_cast<const char*>(part.begin()), part.size());
  }
  return status;
}

TEST(GrpcServer, AnswersHealthChecksAndFollowsSetServing) {
  auto server = GrpcServer::Start({"127.0.0.1:0", {}});
  ASSERT_TRUE(server.ok());
  // HealthCheckResponse: field 1, a varint: 1 serving, 2 not serving.
  std::string response;
  ASSERT_TRUE(CallRaw((*server)->address(), "/grpc.health.v1.Health/Check", "", &response).ok());
  EXPECT_EQ(response, std::string("\x08\x01"));
  (*server)->SetServing(false);
  response.clear();
  ASSERT_TRUE(CallRaw((*server)->address(), "/grpc.health.v1.Health/Check", "", &response).ok());
  EXPECT_EQ(response, std::string("\x08\x02"));
}

TEST(GrpcServer, OffersReflection) {
  auto server = GrpcServer::Start({"127.0.0.1:0", {}});
  ASSERT_TRUE(server.ok());
  // ServerReflectionRequest: field 7, list_services: "*".
  std::string response;
  const grpc::Status status = CallRaw(
      (*server)->address(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
      "\x3a\x01*", &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response, HasSubstr("grpc.health.v1.Health"));
}

std::string HttpGet(int port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
  EXPECT_EQ(send(fd, request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
  std::string response;
  char buffer[4096];
  for (ssize_t got; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) response.append(buffer, got);
  close(fd);
  return response;
}

TEST(MetricsServer, ServesBuildInfoAndRefusesASecondListener) {
  auto first = MetricsServer::Start("127.0.0.1:0", "test");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_GT((*first)->port(), 0);
  EXPECT_THAT(HttpGet((*first)->port(), "/metrics"),
              HasSubstr("zeroshard_build_info{component=\"test\",version=\""));
  ExpectTaken(MetricsServer::Start((*first)->address(), "test").status(), (*first)->address());
}

TEST(MetricsServer, AndAGrpcServerNeverShareAPort) {
  auto grpc_server = GrpcServer::Start({"127.0.0.1:0", {}});
  ASSERT_TRUE(grpc_server.ok());
  ExpectTaken(MetricsServer::Start((*grpc_server)->address(), "test").status(),
              (*grpc_server)->address());
}

}  // namespace
}  // namespace zeroshard
