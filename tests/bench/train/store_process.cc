#include "tests/bench/train/store_process.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/bulk/transport/channel_arguments.h"
#include "common/files.h"
#include "common/grpc_server.h"
#include "common/grpc_status.h"
#include "common/plan/chunk_table.h"
#include "common/plan/model_table.h"
#include "common/spec/decision.h"
#include "common/status_macros.h"
#include "shard_store/host_sessions.h"
#include "shard_store/service/bulk_service.h"
#include "zeroshard/v1/cluster.grpc.pb.h"

namespace zeroshard::bench {
namespace {

constexpr char kRun[] = "bench-1";
constexpr std::chrono::seconds kPatience(120);

// All chunks on the one store.
absl::StatusOr<v1::StoreMap> MapOf(const v1::JobSpec& spec, const std::string& address) {
  ZS_ASSIGN_OR_RETURN(const ModelTable model, MakeModelTable(spec.model()));
  v1::StoreMap map;
  v1::StoreMap::Store* const store = map.add_stores();
  store->set_member("store-0");
  store->set_incarnation("1");
  store->set_address(address);
  map.set_replicas(1);
  for (int64_t chunk = 0; chunk < ChunkCount(model); ++chunk) map.add_placement(0);
  return map;
}

// The coordinator's part in a step: all gradients are there, the decision is durable, the store
// hears of it, the rank does.
class Decider final : public v1::Cluster::Service {
 public:
  Decider(const v1::JobSpec& spec, int threads, int log) : log_(log) {
    store::StoreHostOptions options;
    options.memory_limit = uint64_t{1} << 40;
    options.threads = threads;
    options.on_report = [this](const v1::StoreReport& report) {
      std::lock_guard<std::mutex> lock(mutex_);
      report_ = report;
      changed_.notify_all();
    };
    host_ = std::make_unique<store::StoreHost>(std::move(options));
    directive_.set_term(1);
    directive_.set_run_id(kRun);
    directive_.set_generation(1);
    directive_.set_epoch(1);
    directive_.set_map_version(1);
    directive_.mutable_job()->set_job("bench");
    *directive_.mutable_job()->mutable_spec() = spec;
    directive_.mutable_job()->mutable_base()->set_epoch(1);
  }

  store::StoreHost* host() { return host_.get(); }

  absl::Status Begin() {
    ZS_ASSIGN_OR_RETURN(*directive_.mutable_job()->mutable_map(),
                        MapOf(directive_.job().spec(), "127.0.0.1:1"));
    host_->OnDirective(directive_);
    return absl::OkStatus();
  }

 private:
  grpc::Status CommitStep(grpc::ServerContext*, const v1::CommitStepRequest* request,
                          v1::CommitStepResponse* response) override {
    return ToGrpcStatus(Commit(*request, response->mutable_decision()));
  }

  absl::Status Commit(const v1::CommitStepRequest& request, v1::StepDecision* decision) {
    const uint64_t step = request.record().step();
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const bool sealed = changed_.wait_for(lock, kPatience, [&] {
        return report_.sealed_step() == step || report_.phase() == v1::STORE_PHASE_FAILED;
      });
      if (!sealed || report_.phase() == v1::STORE_PHASE_FAILED) {
        return absl::FailedPreconditionError(
            absl::StrCat("step ", step, ": the store says ", report_.ShortDebugString()));
      }
    }
    *decision = MakeDecision(directive_.job().spec(), step, request.record().grad_norm(),
                             request.record().tokens());
    decision->set_epoch(1);
    decision->set_generation(1);
    decision->set_next_sample(request.next_sample());
    const std::string bytes = decision->SerializeAsString();
    if (write(log_, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()) ||
        fsync(log_) != 0) {
      return ErrnoError(errno, "write", "the file of decisions");
    }
    *directive_.mutable_decision() = *decision;  // one rank commits, one step at a time
    host_->OnDirective(directive_);
    return absl::OkStatus();
  }

  const int log_;
  std::mutex mutex_;
  std::condition_variable changed_;
  v1::StoreReport report_;
  v1::StoreDirective directive_;
  std::unique_ptr<store::StoreHost> host_;  // ends first
};

// Says its port through `out`; ends when nobody holds the other end of `in`.
absl::Status Serve(const v1::JobSpec& spec, int threads, int log, int out, int in) {
  bulk::KeepReceiveMemory();
  Decider decider(spec, threads, log);
  store::BulkService bulk(store::SessionsOf(decider.host()));
  GrpcServer::Options options;
  options.listen = "127.0.0.1:0";
  options.services = {&bulk, &decider};
  options.max_message_bytes = bulk::kMaxMessageBytes;
  options.arguments = bulk::BulkArguments();
  ZS_RETURN_IF_ERROR(decider.Begin());
  ZS_ASSIGN_OR_RETURN(const auto server, GrpcServer::Start(options));
  const std::string port = absl::StrCat(server->port(), "\n");
  if (write(out, port.data(), port.size()) != static_cast<ssize_t>(port.size())) {
    return ErrnoError(errno, "write", "the port");
  }
  char end;
  while (read(in, &end, 1) > 0) {
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<StoreProcess>> StoreProcess::Start(const v1::JobSpec& spec,
                                                                  int threads,
                                                                  const std::string& folder) {
  const std::string path = folder + "/decisions";
  const int log = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (log < 0) return ErrnoError(errno, "create", path);
  int port_pipe[2], end_pipe[2];
  if (pipe2(port_pipe, O_CLOEXEC) != 0 || pipe2(end_pipe, O_CLOEXEC) != 0) {
    return ErrnoError(errno, "make", "a pipe");
  }
  const pid_t pid = fork();
  if (pid < 0) return ErrnoError(errno, "start", "the store's process");
  if (pid == 0) {
    close(port_pipe[0]);
    close(end_pipe[1]);
    const absl::Status status = Serve(spec, threads, log, port_pipe[1], end_pipe[0]);
    if (!status.ok()) std::fprintf(stderr, "store: %s\n", status.ToString().c_str());
    std::_Exit(status.ok() ? 0 : 1);
  }
  close(log);
  close(port_pipe[1]);
  close(end_pipe[0]);
  std::unique_ptr<StoreProcess> process(new StoreProcess());
  process->spec_ = spec;
  process->pid_ = pid;
  process->end_ = end_pipe[1];
  std::string text;
  char byte;
  while (read(port_pipe[0], &byte, 1) == 1 && byte != '\n') text += byte;
  close(port_pipe[0]);
  int port = 0;
  if (!absl::SimpleAtoi(text, &port) || port == 0) {
    return absl::UnavailableError("the store's process did not come to serve");
  }
  process->address_ = absl::StrCat("127.0.0.1:", port);
  return process;
}

StoreProcess::~StoreProcess() {
  close(end_);
  waitpid(pid_, nullptr, 0);
}

v1::Assign StoreProcess::Assignment(int rank, int ranks) const {
  v1::Assign assign;
  assign.set_run_id(kRun);
  assign.set_job("bench");
  assign.set_generation(1);
  assign.set_rank(static_cast<uint32_t>(rank));
  assign.set_world_size(static_cast<uint32_t>(ranks));
  *assign.mutable_spec() = spec_;
  assign.set_first_step(1);
  // Start has made the same map of the same specification.
  if (auto map = MapOf(spec_, address_); map.ok()) *assign.mutable_stores() = *std::move(map);
  assign.mutable_version()->set_epoch(1);
  return assign;
}

}  // namespace zeroshard::bench
