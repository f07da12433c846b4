// The coordinator as the client sees it. Errors say what to do about them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/stop_token.h"
#include "common/security/security.h"
#include "zeroshard/v1/cluster.grpc.pb.h"
#include "zeroshard/v1/jobs.grpc.pb.h"

namespace zeroshard {

// Thread-safe. Each call waits at most `timeout` for its answer; a stream ends when it is done, or
// by keepalive 40 s after the coordinator fell silent.
//
// Errors, by status code: UNAVAILABLE (nobody answers at the address, or not in TLS as this client
// wants it: which of the options is wrong is in the message), the coordinator's own
// NOT_FOUND, ALREADY_EXISTS, INVALID_ARGUMENT and FAILED_PRECONDITION, CANCELLED (stopped).
class JobsClient {
 public:
  // INVALID_ARGUMENT: no host:port, or another host and `security` (null: plaintext on this host)
  // does not protect what is said to it.
  static absl::StatusOr<std::unique_ptr<JobsClient>> Create(
      const std::string& address, absl::Duration timeout,
      std::shared_ptr<const security::Security> security = nullptr);

  absl::StatusOr<v1::SubmitResponse> Submit(const v1::SubmitRequest& request);
  absl::StatusOr<v1::ListResponse> List();
  absl::StatusOr<v1::JobStatus> Get(const std::string& job);
  absl::StatusOr<v1::JobStatus> Cancel(const std::string& job, bool save = false);
  absl::StatusOr<v1::NodesResponse> Nodes();
  absl::StatusOr<v1::CheckpointsResponse> Checkpoints(const std::string& job);
  absl::StatusOr<v1::VersionResponse> Version();
  absl::Status ReportExit(const v1::ReportExitRequest& request);

  // Calls `on_update` for each message, on this thread. OK when the coordinator ended the stream.
  absl::Status Watch(const std::string& job, uint64_t after_step, StopToken* stop,
                     const std::function<void(const v1::WatchUpdate&)>& on_update);
  absl::Status History(const std::string& job,
                       const std::function<void(const v1::StepRecord&)>& on_record);
  absl::Status Logs(const std::string& job, std::optional<uint32_t> rank, bool follow,
                    const std::function<void(const v1::LogChunk&)>& on_chunk);

  const std::string& address() const { return address_; }

 private:
  JobsClient() = default;

  template <typename Response, typename Call>
  absl::StatusOr<Response> Unary(const Call& call);
  absl::Status Explain(const grpc::Status& status) const;
  void Authorise(grpc::ClientContext* context) const;

  std::string address_;
  absl::Duration timeout_;
  std::shared_ptr<const security::Security> security_;
  std::unique_ptr<v1::Jobs::Stub> jobs_;
  std::unique_ptr<v1::Cluster::Stub> cluster_;
};

}  // namespace zeroshard
