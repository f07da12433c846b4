#include "client/jobs_client.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/net_address.h"
#include "common/security/tls_probe.h"
#include "common/status_macros.h"
#include "grpcpp/create_channel.h"

namespace zeroshard {
namespace {

// What finding out why nobody answers may take over and above the call.
constexpr absl::Duration kProbe = absl::Seconds(2);

std::chrono::system_clock::time_point After(absl::Duration timeout) {
  return std::chrono::system_clock::now() + absl::ToChronoMicroseconds(timeout);
}

grpc::ChannelArguments Arguments() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // A coordinator that comes back is found within a second.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  // The cluster's own network is not behind the web proxy.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return arguments;
}

}  // namespace

absl::StatusOr<std::unique_ptr<JobsClient>> JobsClient::Create(
    const std::string& address, absl::Duration timeout,
    std::shared_ptr<const security::Security> security) {
  const absl::StatusOr<HostPort> parsed = ParseHostPort(address);
  if (!parsed.ok() || parsed->port == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--coordinator ", address, ": ", parsed.ok() ? "port 0" : parsed.status().message(),
        "; wanted host:port, for example 127.0.0.1:7070"));
  }
  if (security == nullptr) security = security::Security::Plaintext();
  ZS_RETURN_IF_ERROR(security->CheckTarget(address, "--coordinator"));
  std::unique_ptr<JobsClient> client(new JobsClient());
  client->address_ = address;
  client->timeout_ = timeout;
  const auto channel = grpc::CreateCustomChannel(
      address, security->ChannelCredentials(security::Role::kCoordinator), Arguments());
  client->security_ = std::move(security);
  client->jobs_ = v1::Jobs::NewStub(channel);
  client->cluster_ = v1::Cluster::NewStub(channel);
  return client;
}

void JobsClient::Authorise(grpc::ClientContext* context) const {
  const std::string header = security_->Authorization();
  if (!header.empty()) context->AddMetadata("authorization", header);
}

absl::Status JobsClient::Explain(const grpc::Status& status) const {
  if (status.ok()) return absl::OkStatus();
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE ||
      status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    const std::string trouble =
        TlsTrouble(*security_, address_, security::Role::kCoordinator, kProbe);
    if (!trouble.empty()) return absl::UnavailableError(trouble);
  }
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return absl::UnavailableError(absl::StrCat(
          "no coordinator answers at ", address_, " (", status.error_message(),
          "): start one with zeroshard-coordinator, name another with --coordinator HOST:PORT or "
          "ZEROSHARD_COORDINATOR, or run a whole cluster here with zeroshard local JOB.yaml"));
    case grpc::StatusCode::UNIMPLEMENTED:
      return absl::UnavailableError(
          absl::StrCat("what answers at ", address_,
                       " is no coordinator of this version; look at --coordinator"));
    default:
      return FromGrpcStatus(status);
  }
}

template <typename Response, typename Call>
absl::StatusOr<Response> JobsClient::Unary(const Call& call) {
  grpc::ClientContext context;
  Authorise(&context);
  context.set_deadline(After(timeout_));
  Response response;
  if (absl::Status status = Explain(call(&context, &response)); !status.ok()) return status;
  return response;
}

absl::StatusOr<v1::SubmitResponse> JobsClient::Submit(const v1::SubmitRequest& request) {
  return Unary<v1::SubmitResponse>([&](grpc::ClientContext* context, v1::SubmitResponse* response) {
    return jobs_->Submit(context, request, response);
  });
}

absl::StatusOr<v1::ListResponse> JobsClient::List() {
  return Unary<v1::ListResponse>([&](grpc::ClientContext* context, v1::ListResponse* response) {
    return jobs_->List(context, v1::ListRequest(), response);
  });
}

absl::StatusOr<v1::JobStatus> JobsClient::Get(const std::string& job) {
  v1::GetRequest request;
  request.set_job(job);
  return Unary<v1::JobStatus>([&](grpc::ClientContext* context, v1::JobStatus* response) {
    return jobs_->Get(context, request, response);
  });
}

absl::StatusOr<v1::JobStatus> JobsClient::Cancel(const std::string& job, bool save) {
  v1::CancelRequest request;
  request.set_job(job);
  request.set_save(save);
  return Unary<v1::JobStatus>([&](grpc::ClientContext* context, v1::JobStatus* response) {
    return jobs_->Cancel(context, request, response);
  });
}

absl::StatusOr<v1::NodesResponse> JobsClient::Nodes() {
  return Unary<v1::NodesResponse>([&](grpc::ClientContext* context, v1::NodesResponse* response) {
    return jobs_->Nodes(context, v1::NodesRequest(), response);
  });
}

absl::StatusOr<v1::CheckpointsResponse> JobsClient::Checkpoints(const std::string& job) {
  v1::CheckpointsRequest request;
  request.set_job(job);
  return Unary<v1::CheckpointsResponse>(
      [&](grpc::ClientContext* context, v1::CheckpointsResponse* response) {
        return jobs_->Checkpoints(context, request, response);
      });
}

absl::StatusOr<v1::VersionResponse> JobsClient::Version() {
  return Unary<v1::VersionResponse>(
      [&](grpc::ClientContext* context, v1::VersionResponse* response) {
        return jobs_->Version(context, v1::VersionRequest(), response);
      });
}

absl::Status JobsClient::ReportExit(const v1::ReportExitRequest& request) {
  return Unary<v1::ReportExitResponse>(
             [&](grpc::ClientContext* context, v1::ReportExitResponse* response) {
               return cluster_->ReportExit(context, request, response);
             })
      .status();
}

absl::Status JobsClient::Watch(const std::string& job, uint64_t after_step, StopToken* stop,
                               const std::function<void(const v1::WatchUpdate&)>& on_update) {
  v1::WatchRequest request;
  request.set_job(job);
  request.set_after_step(after_step);
  request.set_follow(true);
  grpc::ClientContext context;
  Authorise(&context);
  const StopToken::Call call(stop, &context);
  const auto reader = jobs_->Watch(&context, request);
  v1::WatchUpdate update;
  while (reader->Read(&update)) on_update(update);
  return Explain(reader->Finish());
}

absl::Status JobsClient::History(const std::string& job,
                                 const std::function<void(const v1::StepRecord&)>& on_record) {
  v1::HistoryRequest request;
  request.set_job(job);
  grpc::ClientContext context;
  Authorise(&context);
  const auto reader = jobs_->History(&context, request);
  v1::StepRecord record;
  while (reader->Read(&record)) on_record(record);
  return Explain(reader->Finish());
}

absl::Status JobsClient::Logs(const std::string& job, std::optional<uint32_t> rank, bool follow,
                              const std::function<void(const v1::LogChunk&)>& on_chunk) {
  v1::LogsRequest request;
  request.set_job(job);
  request.set_follow(follow);
  if (rank) request.set_rank(*rank);
  grpc::ClientContext context;
  Authorise(&context);
  const auto reader = jobs_->Logs(&context, request);
  v1::LogChunk chunk;
  while (reader->Read(&chunk)) on_chunk(chunk);
  return Explain(reader->Finish());
}

}  // namespace zeroshard
