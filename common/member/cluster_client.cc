#include "common/member/cluster_client.h"

#include <algorithm>
#include <chrono>
#include <functional>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/member/backoff.h"
#include "common/member/channel.h"

namespace zeroshard {
namespace {

// What a call that does not wait at the coordinator may take.
constexpr absl::Duration kAttempt = absl::Seconds(10);
// How much later than the coordinator's own deadline ours is, so that its message arrives.
constexpr absl::Duration kGrace = absl::Seconds(3);

using Steady = std::chrono::steady_clock;

void SetDeadline(grpc::ClientContext* context, absl::Duration from_now) {
  context->set_deadline(
      gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                   gpr_time_from_millis(absl::ToInt64Milliseconds(from_now), GPR_TIMESPAN)));
}

// Codes that gRPC itself gives when the process at the other end goes away or is not there.
bool MayPass(grpc::StatusCode code) {
  return code == grpc::StatusCode::UNAVAILABLE || code == grpc::StatusCode::CANCELLED ||
         code == grpc::StatusCode::UNKNOWN;
}

uint32_t Milliseconds(absl::Duration duration) {
  const absl::Duration bounded = std::clamp(duration, absl::Milliseconds(1), absl::Hours(24));
  return static_cast<uint32_t>(absl::ToInt64Milliseconds(bounded));
}

struct Request {
  std::string what;  // "barrier start"
  std::string address;
  bool waits = false;     // the coordinator may answer as late as the deadline
  bool outlasts = false;  // time in which the coordinator is away does not count
};

// Calls `attempt` with the time left until it succeeds or fails for good.
absl::Status Retry(
    const Request& request, absl::Duration timeout, Cancellation* cancellation,
    const std::function<grpc::Status(grpc::ClientContext*, absl::Duration)>& attempt) {
  Cancellation never;
  Cancellation* cancel = cancellation != nullptr ? cancellation : &never;
  Backoff backoff(absl::Milliseconds(50), absl::Seconds(2), RandomSeed());
  auto start = Steady::now();
  while (true) {
    if (absl::Status reason = cancel->status(); !reason.ok()) return reason;
    const absl::Duration left = timeout - absl::FromChrono(Steady::now() - start);
    grpc::Status status;
    {
      grpc::ClientContext context;
      Cancellation::Scope scope(cancel, &context);
      SetDeadline(&context, request.waits ? std::min(left, absl::Hours(24)) + kGrace
                                          : std::min(kAttempt, std::max(left, absl::Seconds(1))));
      status = attempt(&context, std::max(left, absl::ZeroDuration()));
    }
    if (status.ok()) return absl::OkStatus();
    if (absl::Status reason = cancel->status(); !reason.ok()) return reason;
    const bool timed_out = status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
    if (!MayPass(status.error_code()) && (request.waits || !timed_out)) {
      return FromGrpcStatus(status);
    }
    const absl::Duration pause = backoff.Next();
    if (!request.outlasts && absl::FromChrono(Steady::now() - start) + pause >= timeout) {
      return absl::DeadlineExceededError(absl::StrCat(
          request.what, ": the coordinator at ", request.address, " did not answer within ",
          absl::FormatDuration(timeout), "; last error: ", status.error_message()));
    }
    if (cancel->Wait(pause)) return cancel->status();
    if (request.outlasts) start = Steady::now();
  }
}

}  // namespace

ClusterClient::ClusterClient(const std::string& address)
    : address_(address), stub_(v1::Cluster::NewStub(MakeMemberChannel(address))) {}

absl::Status ClusterClient::PutKey(const v1::Fence& fence, const std::string& key,
                                   const std::string& value, absl::Duration timeout,
                                   Cancellation* cancellation) {
  v1::PutKeyRequest request;
  *request.mutable_fence() = fence;
  request.set_key(key);
  request.set_value(value);
  return Retry({absl::StrCat("key ", key), address_}, timeout, cancellation,
               [&](grpc::ClientContext* context, absl::Duration) {
                 v1::PutKeyResponse response;
                 return stub_->PutKey(context, request, &response);
               });
}

absl::StatusOr<std::string> ClusterClient::GetKey(const v1::Fence& fence, const std::string& key,
                                                  absl::Duration timeout,
                                                  Cancellation* cancellation) {
  v1::GetKeyRequest request;
  *request.mutable_fence() = fence;
  request.set_key(key);
  v1::GetKeyResponse response;
  absl::Status status = Retry({absl::StrCat("key ", key), address_, true}, timeout, cancellation,
                              [&](grpc::ClientContext* context, absl::Duration left) {
                                request.set_timeout_ms(Milliseconds(left));
                                return stub_->GetKey(context, request, &response);
                              });
  if (!status.ok()) return status;
  return std::move(*response.mutable_value());
}

absl::Status ClusterClient::Barrier(const v1::Fence& fence, const std::string& name,
                                    absl::Duration timeout, Cancellation* cancellation) {
  v1::BarrierRequest request;
  *request.mutable_fence() = fence;
  request.set_name(name);
  return Retry({absl::StrCat("barrier ", name), address_, true, true}, timeout, cancellation,
               [&](grpc::ClientContext* context, absl::Duration left) {
                 request.set_timeout_ms(Milliseconds(left));
                 v1::BarrierResponse response;
                 return stub_->Barrier(context, request, &response);
               });
}

absl::Status ClusterClient::ReportSteps(const v1::ReportStepsRequest& request,
                                        absl::Duration timeout, Cancellation* cancellation) {
  return Retry({"step report", address_}, timeout, cancellation,
               [&](grpc::ClientContext* context, absl::Duration) {
                 v1::ReportStepsResponse response;
                 return stub_->ReportSteps(context, request, &response);
               });
}

absl::StatusOr<v1::StepDecision> ClusterClient::CommitStep(const v1::CommitStepRequest& request,
                                                           absl::Duration timeout,
                                                           Cancellation* cancellation) {
  v1::CommitStepResponse response;
  absl::Status status =
      Retry({absl::StrCat("commit of step ", request.record().step()), address_, true, true},
            timeout, cancellation, [&](grpc::ClientContext* context, absl::Duration) {
              return stub_->CommitStep(context, request, &response);
            });
  if (!status.ok()) return status;
  if (response.decision().step() != request.record().step()) {
    return absl::InternalError(absl::StrCat(
        "asked for the decision of step ", request.record().step(), ", the coordinator at ",
        address_, " answered with that of step ", response.decision().step()));
  }
  return std::move(*response.mutable_decision());
}

absl::Status ClusterClient::ReportEnd(const v1::ReportEndRequest& request, absl::Duration timeout,
                                      Cancellation* cancellation) {
  return Retry({"end of job report", address_}, timeout, cancellation,
               [&](grpc::ClientContext* context, absl::Duration) {
                 v1::ReportEndResponse response;
                 return stub_->ReportEnd(context, request, &response);
               });
}

}  // namespace zeroshard
