// Whole stores over gRPC on loopback: what a rank pushes is what is applied, what it pulls is what
// AdamW makes of it; a second store is filled from the first.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>

#include "common/bulk/transport/channel_arguments.h"
#include "common/grpc_server.h"
#include "shard_store/host_sessions.h"
#include "shard_store/service/bulk_service.h"
#include "shard_store/service/peer_reader.h"
#include "tests/shard_store/state/small_job.h"
#include "worker/agent/store_client.h"

namespace zeroshard::store {
namespace {

constexpr int64_t kChunk = 4096;

class ServedStore {
 public:
  ServedStore() {
    StoreHostOptions options;
    options.memory_limit = uint64_t{1} << 30;
    options.threads = 2;
    options.chunk_elements = kChunk;
    options.on_report = [this](const v1::StoreReport& report) {
      std::lock_guard<std::mutex> lock(mutex_);
      newest_ = report;
      changed_.notify_all();
    };
    options.connect_peer = [](const v1::StoreMap::Store& peer, const v1::BulkHello& hello) {
      return ConnectPeer(peer, hello, absl::Seconds(30));
    };
    host_ = std::make_unique<StoreHost>(std::move(options));
    service_ = std::make_unique<BulkService>(SessionsOf(host_.get()));
    GrpcServer::Options server;
    server.listen = "127.0.0.1:0";
    server.services = {service_.get()};
    server.max_message_bytes = bulk::kMaxMessageBytes;
    server.arguments = bulk::BulkArguments();
    auto started = GrpcServer::Start(server);
    EXPECT_TRUE(started.ok()) << started.status();
    if (started.ok()) server_ = *std::move(started);
  }

  std::string address() const { return server_->address(); }
  StoreHost* host() { return host_.get(); }
  bool Await(const std::function<bool(const v1::StoreReport&)>& is) {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool met = changed_.wait_for(lock, std::chrono::seconds(30), [&] { return is(newest_); });
    EXPECT_TRUE(met) << newest_.ShortDebugString();
    return met;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  v1::StoreReport newest_;
  std::unique_ptr<StoreHost> host_;
  std::unique_ptr<BulkService> service_;
  std::unique_ptr<GrpcServer> server_;  // ends first
};

class ServedHostTest : public testing::TestWithParam<bool> {
 protected:
  ServedHostTest() {
    shape_.bf16 = GetParam();
    spec_ = MakeSpec(shape_);
    model_ = MakeModel(spec_);
    table_ = ChunkTable::Make(model_, kChunk);
    directive_.set_term(1);
    directive_.set_run_id("small-1");
    directive_.set_generation(1);
    directive_.set_epoch(1);
    directive_.set_map_version(1);
    directive_.mutable_job()->set_job("small");
    *directive_.mutable_job()->mutable_spec() = spec_;
    directive_.mutable_job()->mutable_base()->set_epoch(1);
  }

  void SetStores(const std::vector<const ServedStore*>& stores) {
    v1::StoreMap* map = directive_.mutable_job()->mutable_map();
    map->Clear();
    for (const ServedStore* store : stores) {
      auto* entry = map->add_stores();
      entry->set_member(absl::StrCat("store-", map->stores_size() - 1));
      entry->set_address(store->address());
    }
    map->set_replicas(static_cast<uint32_t>(stores.size()));
    for (size_t c = 0; c < table_.chunks.size(); ++c) {
      for (size_t r = 0; r < stores.size(); ++r) map->add_placement(static_cast<uint32_t>(r));
    }
  }

  absl::StatusOr<std::unique_ptr<StoreClient>> Connect() {
    StoreClientOptions options;
    options.fence.set_member("worker-0");
    options.fence.set_run_id("small-1");
    options.fence.set_generation(directive_.generation());
    options.map = directive_.job().map();
    options.base.set_epoch(1);
    options.chunks = table_;
    options.dtype = shape_.bf16 ? DType::kBF16 : DType::kF32;
    options.most_pushed = options.most_pulled = 1 << 20;
    return StoreClient::Open(std::move(options));
  }

  absl::Status PushAll(StoreClient* client, uint64_t step) {
    std::vector<std::vector<char>> gradients;
    std::vector<Event> events;
    for (size_t u = 0; u < model_.units.size(); ++u) {
      gradients.push_back(GradientOf(model_, u, step, shape_.bf16));
      // In two parts, whose border lies within a chunk.
      const int64_t length = model_.units[u].length, half = length / 2 / 64 * 64;
      const size_t size = shape_.bf16 ? 2 : 4;
      const char* data = gradients.back().data();
      events.push_back(client->Push(step, static_cast<int>(u), half, length, data + half * size));
      events.push_back(client->Push(step, static_cast<int>(u), 0, half, data));
    }
    absl::Status status;
    for (const Event& event : events) status.Update(event.Wait());
    return status;
  }

  void ExpectParameters(StoreClient* client, uint64_t step, const Reference& wanted) {
    for (size_t u = 0; u < model_.units.size(); ++u) {
      const int64_t length = model_.units[u].length;
      std::vector<char> seen(static_cast<size_t>(length) * (shape_.bf16 ? 2 : 4));
      const absl::Status status =
          client->Pull(step, static_cast<int>(u), 0, length, seen.data()).Wait();
      ASSERT_TRUE(status.ok()) << status;
      Chunk whole;
      whole.unit = static_cast<int>(u);
      whole.end = length;
      EXPECT_EQ(seen, wanted.Parameters(whole)) << "unit " << u << " after step " << step;
    }
  }

  JobShape shape_;
  v1::JobSpec spec_;
  ModelTable model_;
  ChunkTable table_;
  v1::StoreDirective directive_;
};

TEST_P(ServedHostTest, StepsOverTwoReplicasAreThoseOfAdamW) {
  ServedStore first, second;
  SetStores({&first, &second});
  first.host()->OnDirective(directive_);
  directive_.mutable_job()->set_store(1);
  second.host()->OnDirective(directive_);
  auto client = Connect();
  ASSERT_TRUE(client.ok()) << client.status();
  Reference reference(model_, shape_);
  ExpectParameters(client->get(), 0, reference);
  for (uint64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(PushAll(client->get(), step).ok());
    const auto sealed = [&](const auto& report) { return report.sealed_step() == step; };
    ASSERT_TRUE(first.Await(sealed) && second.Await(sealed));
    *directive_.mutable_decision() = Decision(step);
    reference.Step(directive_.decision());
    for (uint32_t store = 0; store < 2; ++store) {
      directive_.mutable_job()->set_store(store);
      (store == 0 ? first : second).host()->OnDirective(directive_);
    }
    ExpectParameters(client->get(), step, reference);
  }
}

TEST_P(ServedHostTest, ANewGenerationEndsTheStreamsOfTheOld) {
  ServedStore store;
  SetStores({&store});
  store.host()->OnDirective(directive_);
  auto client = Connect();
  ASSERT_TRUE(client.ok()) << client.status();
  std::vector<char> out(4096);
  const Event pull = (*client)->Pull(1, 0, 0, 64, out.data());  // nobody decides that step
  directive_.set_generation(2);
  store.host()->OnDirective(directive_);
  const absl::Status status = pull.Wait();
  EXPECT_THAT(status.code(),
              testing::AnyOf(absl::StatusCode::kAborted, absl::StatusCode::kFailedPrecondition))
      << status;
  auto next = Connect();
  ASSERT_TRUE(next.ok()) << next.status();
  ExpectParameters(next->get(), 0, Reference(model_, shape_));
}

TEST_P(ServedHostTest, AStoreThatComesLateIsFilledFromAnother) {
  ServedStore first, second;
  SetStores({&first});
  first.host()->OnDirective(directive_);
  Reference reference(model_, shape_);
  {
    auto client = Connect();
    ASSERT_TRUE(client.ok()) << client.status();
    ASSERT_TRUE(PushAll(client->get(), 1).ok());
    ASSERT_TRUE(first.Await([](const auto& report) { return report.sealed_step() == 1; }));
    *directive_.mutable_decision() = Decision(1);
    reference.Step(directive_.decision());
    first.host()->OnDirective(directive_);
    ASSERT_TRUE(first.Await([](const auto& report) { return report.version().step() == 1; }));
  }
  SetStores({&first, &second});
  directive_.set_generation(2);
  directive_.set_map_version(2);
  directive_.mutable_job()->mutable_copy()->set_epoch(1);
  directive_.mutable_job()->mutable_copy()->set_step(1);
  first.host()->OnDirective(directive_);
  for (uint32_t c = 0; c < table_.chunks.size(); ++c) {
    directive_.mutable_job()->add_copies()->set_chunk(c);  // from store 0
  }
  directive_.mutable_job()->set_store(1);
  second.host()->OnDirective(directive_);
  ASSERT_TRUE(second.Await([](const auto& report) {
    return report.phase() == v1::STORE_PHASE_READY && report.version().step() == 1;
  }));
  // A rank that knows the second store alone.
  SetStores({&second});
  auto client = Connect();
  ASSERT_TRUE(client.ok()) << client.status();
  ExpectParameters(client->get(), 1, reference);
}

INSTANTIATE_TEST_SUITE_P(Types, ServedHostTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "bf16" : "fp32"; });

}  // namespace
}  // namespace zeroshard::store
