#include "common/health_client.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/net_address.h"
#include "google/protobuf/wrappers.pb.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/security/credentials.h"

namespace zeroshard {
namespace {

constexpr char kMethod[] = "/grpc.health.v1.Health/Check";
constexpr int kServing = 1;  // HealthCheckResponse.ServingStatus

// On the wire HealthCheckRequest is a string in field 1 and HealthCheckResponse an enum there,
// which is what protobuf's wrappers of a string and of a number are.
using Request = google::protobuf::StringValue;
using Response = google::protobuf::Int32Value;

grpc::Status Call(const std::string& address, const std::string& service, absl::Duration timeout,
                  Response* response) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(4096);
  grpc::TemplatedGenericStub<Request, Response> stub(
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMicroseconds(timeout));
  Request request;
  request.set_value(service);
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareUnaryCall(&context, kMethod, request, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(response, &status, &queue);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);  // ends by the call's deadline
  return status;
}

}  // namespace

absl::StatusOr<bool> CheckHealth(const std::string& address, const std::string& service,
                                 absl::Duration timeout) {
  const absl::StatusOr<HostPort> parsed = ParseHostPort(address);
  if (!parsed.ok() || parsed->port == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        address, ": ", parsed.ok() ? "port 0" : parsed.status().message(),
        "; wanted the address of --health-listen, host:port, for example 127.0.0.1:7072"));
  }
  Response response;
  const grpc::Status status = Call(address, service, timeout, &response);
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
      return response.value() == kServing;
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return absl::UnavailableError(
          absl::StrCat("no health check is answered at ", address, " (", status.error_message(),
                       "): is the daemon running, with --health-listen ", address, "?"));
    case grpc::StatusCode::UNIMPLEMENTED:
      return absl::UnavailableError(absl::StrCat(
          "what answers at ", address, " has no health checks; look at its --health-listen"));
    case grpc::StatusCode::NOT_FOUND:
      return absl::NotFoundError(absl::StrCat("no health service \"", service, "\" at ", address,
                                              "; daemons have \"\" and \"ready\""));
    default:
      return FromGrpcStatus(status);
  }
}

}  // namespace zeroshard
