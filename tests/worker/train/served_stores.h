// Real shard stores behind gRPC servers of this process, with what a coordinator would say to them:
// who holds what, a generation, and a decision once a step is sealed everywhere.
#pragma once

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/checkpoint/state_digest.h"
#include "common/plan/zero_policy.h"
#include "common/spec/decision.h"
#include "common/spec/loss_scale.h"
#include "common/status_macros.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "shard_store/host_sessions.h"
#include "shard_store/service/bulk_service.h"
#include "shard_store/state/store_host.h"
#include "worker/agent/store_client.h"

namespace zeroshard {

class ServedStores {
 public:
  // `nvme_dir`: under which each store has a folder, where the job is offloaded to nvme.
  ServedStores(const v1::JobSpec& spec, int stores, int64_t chunk_elements,
               const std::string& nvme_dir = "")
      : spec_(spec),
        chunks_(ChunkTable::Make(*MakeModelTable(spec.model()), chunk_elements)),
        reports_(static_cast<size_t>(stores)) {
    const uint32_t replicas = std::max<uint32_t>(1, spec.store().replicas());
    for (int s = 0; s < stores; ++s) {
      store::StoreHostOptions options;
      options.memory_limit = uint64_t{1} << 30;
      options.threads = 1;
      options.chunk_elements = chunk_elements;
      if (!nvme_dir.empty()) {
        options.nvme_dir = absl::StrCat(nvme_dir, "/store-", s);
        options.nvme_limit = uint64_t{1} << 30;
        std::filesystem::create_directory(options.nvme_dir);
      }
      options.on_report = [this, s](const v1::StoreReport& report) {
        std::lock_guard lock(mutex_);
        reports_[static_cast<size_t>(s)] = report;
        changed_.notify_all();
      };
      Served& served = served_.emplace_back();
      served.host = std::make_unique<store::StoreHost>(std::move(options));
      served.service = std::make_unique<store::BulkService>(store::SessionsOf(served.host.get()));
      grpc::ServerBuilder builder;
      int port = 0;
      builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
      builder.RegisterService(served.service.get());
      served.server = builder.BuildAndStart();
      v1::StoreMap::Store& store = *map_.add_stores();
      store.set_member(absl::StrCat("store-", s));
      store.set_incarnation(absl::StrCat("incarnation-", s));
      store.set_host("127.0.0.1");
      store.set_address(absl::StrCat("127.0.0.1:", port));
    }
    map_.set_replicas(replicas);
    for (size_t c = 0; c < chunks_.chunks.size(); ++c)
      for (uint32_t r = 0; r < replicas; ++r)
        map_.add_placement(static_cast<uint32_t>((c + r) % static_cast<size_t>(stores)));
  }
  ~ServedStores() {
    for (Served& served : served_) served.server->Shutdown(std::chrono::system_clock::now());
  }

  // Opens the next generation everywhere.
  void Open() {
    ++generation_;
    Direct(0, true);
    const auto opened = [this](const v1::StoreReport& r) {
      return r.generation() == generation_ && r.phase() != v1::STORE_PHASE_LOADING;
    };
    const absl::Status status = Await(opened, "opens the generation");
    EXPECT_TRUE(status.ok()) << status;
  }

  std::unique_ptr<StateStore> MakeRank(int rank) { return std::make_unique<Rank>(this, rank); }

  // Of the weights after `step`, from all stores.
  std::string Digest(uint64_t step) {
    Direct(step, false);
    const absl::Status status =
        Await([step](const v1::StoreReport& r) { return r.digest_step() == step; }, "digests");
    EXPECT_TRUE(status.ok()) << status;
    WeightDigest sum;
    std::lock_guard lock(mutex_);
    for (const v1::StoreReport& r : reports_)
      sum.Combine({.low = r.digest_low(), .high = r.digest_high()});
    return sum.Hex();
  }

  // Of the next step.
  v1::LossScale loss_scale() const {
    return decision_.step() == 0 ? InitialLossScale(spec_) : decision_.loss_scale();
  }

  uint64_t pushed() const {
    uint64_t bytes = 0;
    for (const Served& served : served_) bytes += served.host->traffic().pushed;
    return bytes;
  }
  uint64_t pulled() const {
    uint64_t bytes = 0;
    for (const Served& served : served_) bytes += served.host->traffic().pulled;
    return bytes;
  }

 private:
  struct Served {
    std::unique_ptr<store::StoreHost> host;
    std::unique_ptr<store::BulkService> service;
    std::unique_ptr<grpc::Server> server;
  };

  // The worker's own client, whose commits this decides.
  class Rank : public StateStore {
   public:
    Rank(ServedStores* owner, int rank) : owner_(*owner) {
      StoreClientOptions options;
      options.fence.set_member(absl::StrCat("worker-", rank));
      options.fence.set_incarnation(absl::StrCat("of-", rank));
      options.fence.set_run_id(kRun);
      options.fence.set_generation(owner->generation_);
      options.fence.set_rank(static_cast<uint32_t>(rank));
      options.map = owner->map_;
      options.base = owner->version_;
      options.chunks = owner->chunks_;
      options.dtype = ComputeType(owner->spec_);
      options.most_pushed = options.most_pulled = 100000;
      options.open_timeout = absl::Seconds(30);
      options.stall_timeout = options.load_timeout = absl::Seconds(30);
      auto client = StoreClient::Open(std::move(options));
      EXPECT_TRUE(client.ok()) << client.status();
      if (client.ok()) client_ = *std::move(client);
    }
    v1::StateVersion base() const override { return client_->base(); }
    Event Push(uint64_t step, int unit, int64_t begin, int64_t end, const void* data,
               const Event& after) override {
      return client_->Push(step, unit, begin, end, data, after);
    }
    Event Pull(uint64_t step, int unit, int64_t begin, int64_t end, void* out,
               const Event& after) override {
      return client_->Pull(step, unit, begin, end, out, after);
    }
    absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord& record, uint64_t next_sample,
                                            uint64_t samples) override {
      return owner_.Commit(record, next_sample);
    }
    void Abort(const std::string& reason) override { client_->Abort(reason); }
    const OffloadCounters& counters() const override { return client_->counters(); }

   private:
    ServedStores& owner_;
    std::unique_ptr<StoreClient> client_;
  };

  static constexpr char kRun[] = "tiny-1";

  void Direct(uint64_t digest_step, bool with_job) {
    for (size_t s = 0; s < served_.size(); ++s) {
      v1::StoreDirective directive;
      directive.set_term(1);
      directive.set_run_id(kRun);
      directive.set_generation(generation_);
      directive.set_epoch(1);
      directive.set_map_version(1);
      directive.set_digest_step(digest_step);
      if (decision_.step() > 0) *directive.mutable_decision() = decision_;
      if (with_job && generation_ == 1) {
        v1::StoreJob& job = *directive.mutable_job();
        job.set_job(spec_.name());
        *job.mutable_spec() = spec_;
        *job.mutable_map() = map_;
        job.set_store(static_cast<uint32_t>(s));
        *job.mutable_base() = version_;
      }
      served_[s].host->OnDirective(directive);
    }
  }

  template <typename Wanted>
  absl::Status Await(const Wanted& wanted, const char* what) {
    std::unique_lock lock(mutex_);
    absl::Status failed;
    const bool came = changed_.wait_for(lock, std::chrono::seconds(60), [&] {
      for (const v1::StoreReport& r : reports_) {
        if (r.phase() == v1::STORE_PHASE_FAILED) failed = absl::InternalError(r.problem());
      }
      return !failed.ok() || std::all_of(reports_.begin(), reports_.end(), wanted);
    });
    if (!failed.ok()) return failed;
    if (came) return absl::OkStatus();
    std::string text;
    for (const v1::StoreReport& r : reports_) absl::StrAppend(&text, r.ShortDebugString(), "\n");
    return absl::DeadlineExceededError(absl::StrCat("not every store ", what, ":\n", text));
  }

  absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord& record, uint64_t next_sample) {
    const uint64_t step = record.step();
    ZS_RETURN_IF_ERROR(Await(
        [&](const v1::StoreReport& r) {
          return r.sealed_step() == step && r.version().step() + 1 == step &&
                 r.generation() == generation_;
        },
        "sealed the step"));
    decision_ = MakeDecision(spec_, step, record.grad_norm(), record.tokens(), loss_scale(),
                             record.skipped());
    decision_.set_epoch(1);
    decision_.set_generation(generation_);
    decision_.set_next_sample(next_sample);
    version_.set_step(step);
    Direct(0, false);
    return decision_;
  }

  const v1::JobSpec spec_;
  const ChunkTable chunks_;
  v1::StoreMap map_;
  uint64_t generation_ = 0;
  v1::StateVersion version_ = First();
  v1::StepDecision decision_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<v1::StoreReport> reports_;
  std::vector<Served> served_;  // last: they report to the above

  static v1::StateVersion First() {
    v1::StateVersion version;
    version.set_epoch(1);
    return version;
  }
};

}  // namespace zeroshard
