// The offload path of a rank against stores that do what the test says.
#include "worker/agent/store_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <thread>

#include "tests/common/member/fake_cluster.h"
#include "tests/shard_store/service/fake_store.h"
#include "worker/agent/transfer.h"

namespace zeroshard {
namespace {

using store::FakeStore;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Units of 2500 and 700 elements in chunks of 1000: 0 to 2 and 3.
constexpr int64_t kUnits[] = {2500, 700};
constexpr int64_t kChunk = 1000;

StoreClientOptions Options(const std::vector<FakeStore*>& stores, uint32_t replicas = 1) {
  StoreClientOptions options;
  options.fence.set_member("worker-0");
  options.fence.set_run_id("run-1");
  options.fence.set_generation(3);
  options.base.set_epoch(2);
  options.base.set_step(10);
  options.dtype = DType::kBF16;
  options.chunks.chunk_elements = kChunk;
  for (int unit = 0; unit < 2; ++unit) {
    options.chunks.first.push_back(static_cast<int>(options.chunks.chunks.size()));
    for (int64_t begin = 0; begin < kUnits[unit]; begin += kChunk) {
      options.chunks.chunks.push_back({unit, begin, std::min(kUnits[unit], begin + kChunk), true});
    }
  }
  options.chunks.first.push_back(static_cast<int>(options.chunks.chunks.size()));
  for (const FakeStore* store : stores) {
    auto* entry = options.map.add_stores();
    entry->set_member(absl::StrCat("store-", options.map.stores_size() - 1));
    entry->set_address(store->address());
  }
  options.map.set_replicas(replicas);
  for (size_t c = 0; c < options.chunks.chunks.size(); ++c) {
    for (uint32_t r = 0; r < replicas; ++r) {
      options.map.add_placement(static_cast<uint32_t>((c + r) % stores.size()));
    }
  }
  options.most_pushed = options.most_pulled = 1 << 30;
  options.open_timeout = absl::Seconds(30);
  return options;
}

std::string Values(size_t elements, int seed) {
  std::string bytes(elements * 2, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31 + i / 97 + seed);
  return bytes;
}

// What a store has of a chunk, its ranges joined; they must not leave gaps.
std::string Staged(FakeStore* store, uint64_t step, uint32_t chunk, uint32_t begin) {
  std::string bytes;
  store->With([&](auto& state) {
    for (const auto& [at, part] : state.pushed[{step, chunk}]) {
      EXPECT_EQ(at, begin + bytes.size() / 2);
      bytes += part;
    }
  });
  return bytes;
}

TEST(StoreClientTest, TellsEveryStoreWhoItIsOnTwoStreams) {
  FakeStore first, second;
  const auto client = StoreClient::Open(Options({&first, &second}));
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ((*client)->base().step(), 10u);
  for (FakeStore* store : {&first, &second}) {
    store->With([](auto& state) {
      ASSERT_EQ(state.hellos.size(), 2u);
      for (const auto& hello : state.hellos) {
        EXPECT_EQ(hello.member(), "worker-0");
        EXPECT_EQ(hello.run_id(), "run-1");
        EXPECT_EQ(hello.generation(), 3u);
        EXPECT_FALSE(hello.store());
      }
    });
  }
}

TEST(StoreClientTest, APushReachesTheStoresOfItsChunksCutAtTheirEnds) {
  FakeStore first, second;
  const auto client = StoreClient::Open(Options({&first, &second}));
  ASSERT_TRUE(client.ok()) << client.status();
  const std::string data = Values(1600, 1);
  const Event event = (*client)->Push(11, 0, 700, 2300, data.data());
  ASSERT_TRUE(event.Wait().ok());
  EXPECT_TRUE(event.Done());
  EXPECT_EQ(Staged(&first, 11, 0, 700), data.substr(0, 600));
  EXPECT_EQ(Staged(&second, 11, 1, 0), data.substr(600, 2000));
  EXPECT_EQ(Staged(&first, 11, 2, 0), data.substr(2600));
  EXPECT_EQ((*client)->counters().pushed, data.size());
}

TEST(StoreClientTest, APushReachesEveryReplicaBeforeItIsDone) {
  FakeStore first, second, third;
  const auto client = StoreClient::Open(Options({&first, &second, &third}, 2));
  ASSERT_TRUE(client.ok()) << client.status();
  second.With([](auto& state) { state.hold_pushes = true; });
  const std::string data = Values(700, 2);
  const Event event = (*client)->Push(11, 1, 0, 700, data.data());  // chunk 3: stores 0 and 1
  ASSERT_TRUE(first.Await([](const auto& state) { return state.push_frames == 1; }));
  ASSERT_TRUE(second.Await([](const auto& state) { return state.early.size() == 1; }));
  EXPECT_FALSE(event.Done());
  second.Release();
  ASSERT_TRUE(event.Wait().ok());
  EXPECT_EQ(Staged(&first, 11, 3, 0), data);
  EXPECT_EQ(Staged(&second, 11, 3, 0), data);
  third.With([](auto& state) { EXPECT_EQ(state.push_frames, 0); });
  EXPECT_EQ((*client)->counters().pushed, 2 * data.size());
}

TEST(StoreClientTest, AReplicaThatTheMapLacksIsNotWaitedFor) {
  FakeStore store;
  StoreClientOptions options = Options({&store}, 1);
  options.map.set_replicas(2);
  options.map.clear_placement();
  for (int c = 0; c < 4; ++c) {
    options.map.add_placement(c % 2 == 0 ? 0xffffffff : 0);
    options.map.add_placement(c % 2 == 0 ? 0 : 0xffffffff);
  }
  const auto client = StoreClient::Open(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const std::string data = Values(2500, 3);
  ASSERT_TRUE((*client)->Push(11, 0, 0, 2500, data.data()).Wait().ok());
  EXPECT_EQ((*client)->counters().pushed, data.size());
  store.Publish(11, 1, Values(1000, 4));
  std::string out(2000, '\0');
  ASSERT_TRUE((*client)->Pull(11, 0, 1000, 2000, out.data()).Wait().ok());
  EXPECT_EQ(out, Values(1000, 4));
}

TEST(StoreClientTest, APushStartsAfterItsEventAndHasThatOnesError) {
  FakeStore store;
  const auto client = StoreClient::Open(Options({&store}));
  ASSERT_TRUE(client.ok()) << client.status();
  auto before = std::make_shared<HostEvent>();
  auto failed = std::make_shared<HostEvent>();
  const std::string data = Values(700, 5);
  const Event second = (*client)->Push(11, 1, 0, 700, data.data(), Event(failed));
  failed->Finish(absl::DataLossError("rank 3 is not a number"));
  EXPECT_EQ(second.Wait(), absl::DataLossError("rank 3 is not a number"));
  const Event first = (*client)->Push(12, 1, 0, 700, data.data(), Event(before));
  EXPECT_FALSE(first.Done());
  store.With([](auto& state) { EXPECT_EQ(state.push_frames, 0); });
  before->Finish(absl::OkStatus());
  EXPECT_TRUE(first.Wait().ok());
  store.With([](auto& state) { EXPECT_EQ(state.push_frames, 1); });
}

TEST(StoreClientTest, APullStartsAfterItsEventAndHasThatOnesError) {
  FakeStore store;
  const auto client = StoreClient::Open(Options({&store}));
  ASSERT_TRUE(client.ok()) << client.status();
  store.Publish(11, 0, Values(1000, 4));
  auto before = std::make_shared<HostEvent>();
  auto failed = std::make_shared<HostEvent>();
  std::string first(2000, '\0'), second(2000, '\0'), third(2000, '\0');
  const Event kept = (*client)->Pull(11, 0, 0, 1000, first.data(), Event(failed));
  const Event held = (*client)->Pull(11, 0, 0, 1000, second.data(), Event(before));
  // One that waits for nothing goes ahead of those.
  ASSERT_TRUE((*client)->Pull(11, 0, 0, 1000, third.data()).Wait().ok());
  EXPECT_EQ(third, Values(1000, 4));
  EXPECT_FALSE(kept.Done());
  failed->Finish(absl::DataLossError("rank 3 is not a number"));
  EXPECT_EQ(kept.Wait(), absl::DataLossError("rank 3 is not a number"));
  EXPECT_EQ(first, std::string(2000, '\0'));
  EXPECT_EQ((*client)->Pull(11, 0, 0, 1000, first.data(), Event(failed)).Wait(),
            absl::DataLossError("rank 3 is not a number"));
  EXPECT_EQ((*client)->Pull(11, 0, 0, 0, first.data(), Event(failed)).Wait(),
            absl::DataLossError("rank 3 is not a number"));
  EXPECT_FALSE(held.Done());
  EXPECT_EQ(second, std::string(2000, '\0'));
  before->Finish(absl::OkStatus());
  EXPECT_TRUE(held.Wait().ok());
  EXPECT_EQ(second, Values(1000, 4));
}

TEST(StoreClientTest, NotMoreThanTheBoundIsOnItsWay) {
  FakeStore store;
  StoreClientOptions options = Options({&store});
  options.most_pushed = 1500;
  const auto client = StoreClient::Open(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const std::string data = Values(2500, 6);
  int early = 0;
  store.With([](auto& state) { state.hold_pushes = true; });
  // Of the first push one chunk of 1000 is sent; the next is for when that is acknowledged.
  const Event event = (*client)->Push(11, 0, 0, 2500, data.data());
  ASSERT_TRUE(store.Await([](const auto& state) { return state.early.size() == 1; }));
  std::atomic<int> at_once{0};
  store.With([&](auto& state) {
    early = static_cast<int>(state.early.size());
    state.on_push = [&](const bulk::Header&) {
      ++at_once;
      return absl::OkStatus();
    };
  });
  EXPECT_EQ(early, 1);
  store.Release();
  ASSERT_TRUE(event.Wait().ok());
  EXPECT_EQ(at_once, 3);
  EXPECT_EQ(Staged(&store, 11, 0, 0) + Staged(&store, 11, 1, 0) + Staged(&store, 11, 2, 0), data);
}

TEST(StoreClientTest, PullsAboveTheBoundAreAskedForLater) {
  FakeStore store;
  StoreClientOptions options = Options({&store});
  options.most_pulled = 1000;
  const auto client = StoreClient::Open(options);
  ASSERT_TRUE(client.ok()) << client.status();
  std::string first(2000, '\0'), second(2000, '\0');
  const Event one = (*client)->Pull(11, 0, 0, 1000, first.data());
  const Event two = (*client)->Pull(11, 0, 1000, 2000, second.data());
  ASSERT_TRUE(store.Await([](const auto& state) { return state.waiting.size() == 1; }));
  store.Publish(11, 1, Values(1000, 7));
  store.With([](auto& state) { EXPECT_EQ(state.pulls, 1); });
  store.Publish(11, 0, Values(1000, 8));
  EXPECT_TRUE(one.Wait().ok());
  EXPECT_TRUE(two.Wait().ok());
  EXPECT_EQ(first, Values(1000, 8));
  EXPECT_EQ(second, Values(1000, 7));
}

TEST(StoreClientTest, APullWaitsForItsVersionAndPutsChunksWhereTheyBelong) {
  FakeStore first, second;
  const auto client = StoreClient::Open(Options({&first, &second}));
  ASSERT_TRUE(client.ok()) << client.status();
  const std::string whole = Values(2500, 9);
  std::string out(1600 * 2, '\0');
  const Event event = (*client)->Pull(11, 0, 700, 2300, out.data());
  ASSERT_TRUE(first.Await([](const auto& state) { return state.waiting.size() == 2; }));
  second.Publish(11, 1, whole.substr(2000, 2000));
  first.Publish(11, 2, whole.substr(4000, 1000));
  EXPECT_FALSE(event.Done());
  first.Publish(11, 0, whole.substr(0, 2000));
  ASSERT_TRUE(event.Wait().ok());
  EXPECT_EQ(out, whole.substr(1400, 3200));
  EXPECT_EQ((*client)->counters().pulled, out.size());
}

TEST(StoreClientTest, PullsOfRanksAreSpreadOverReplicas) {
  FakeStore first, second;
  for (const uint32_t rank : {0u, 1u}) {
    StoreClientOptions options = Options({&first, &second}, 2);
    options.fence.set_rank(rank);
    const auto client = StoreClient::Open(options);
    ASSERT_TRUE(client.ok()) << client.status();
    std::string out(5000, '\0');
    const Event event = (*client)->Pull(11, 0, 0, 2500, out.data());
    // Chunk c is on stores c and c + 1 of two; replica (rank + c) is store rank for each.
    FakeStore* const asked = rank == 0 ? &first : &second;
    ASSERT_TRUE(asked->Await([](const auto& state) { return state.waiting.size() == 3; }));
    for (uint32_t c = 0; c < 3; ++c) asked->Publish(11, c, Values(c < 2 ? 1000 : 500, 1));
    EXPECT_TRUE(event.Wait().ok());
  }
  first.With([](auto& state) { EXPECT_EQ(state.pulls, 3); });
}

TEST(StoreClientTest, EmptyRangesAreDoneAtOnce) {
  FakeStore store;
  const auto client = StoreClient::Open(Options({&store}));
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE((*client)->Push(11, 0, 5, 5, nullptr).Done());
  EXPECT_TRUE((*client)->Pull(11, 1, 700, 700, nullptr).Done());
}

TEST(StoreClientTest, RangesOutsideAUnitAreRefused) {
  FakeStore store;
  const auto client = StoreClient::Open(Options({&store}));
  ASSERT_TRUE(client.ok()) << client.status();
  std::string data(6000, '\0');
  EXPECT_EQ((*client)->Push(11, 1, 0, 701, data.data()).Wait().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*client)->Pull(11, 2, 0, 1, data.data()).Wait().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*client)->Pull(11, 0, -1, 1, data.data()).Wait().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(StoreClientTest, AStoreThatIsNotReadyIsAskedAgain) {
  FakeStore store;
  std::atomic<int> asked{0};
  store.With([&](auto& state) {
    state.refuse = [&](const v1::BulkHello&) {
      return ++asked < 6 ? absl::UnavailableError("generation 3 is not open here yet")
                         : absl::OkStatus();
    };
  });
  const auto client = StoreClient::Open(Options({&store}));
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_GE(asked, 6);
}

TEST(StoreClientTest, AStoreThatIsNeverReadyIsNamed) {
  FakeStore store;
  store.With([](auto& state) {
    state.refuse = [](const v1::BulkHello&) {
      return absl::UnavailableError("generation 3 is not open here yet");
    };
  });
  StoreClientOptions options = Options({&store});
  options.open_timeout = absl::Milliseconds(100);
  const absl::Status status = StoreClient::Open(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("store-0"), HasSubstr(store.address()),
                                      HasSubstr("not open here yet")));
}

TEST(StoreClientTest, AGenerationThatIsOverIsNotTriedAgain) {
  FakeStore store;
  store.With([](auto& state) {
    state.refuse = [](const v1::BulkHello&) {
      return absl::FailedPreconditionError("generation 3 is over");
    };
  });
  EXPECT_EQ(StoreClient::Open(Options({&store})).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(StoreClientTest, OpeningEndsWhenTheRunIsStopped) {
  FakeStore store;
  store.Stop();
  Cancellation cancellation;
  StoreClientOptions options = Options({&store});
  options.cancellation = &cancellation;
  absl::Status status;
  std::thread opener([&] { status = StoreClient::Open(options).status(); });
  cancellation.Cancel(absl::CancelledError("stopped"));
  opener.join();
  EXPECT_EQ(status, absl::CancelledError("stopped"));
}

TEST(StoreClientTest, AMapThatDoesNotFitIsRefused) {
  FakeStore store;
  StoreClientOptions options = Options({&store});
  options.map.mutable_placement()->RemoveLast();
  EXPECT_EQ(StoreClient::Open(options).status().code(), absl::StatusCode::kInvalidArgument);
  options = Options({&store});
  options.map.set_placement(1, 7);
  EXPECT_THAT(StoreClient::Open(options).status().message(), HasSubstr("chunk 1"));
}

TEST(StoreClientTest, AStoreThatDiesEndsEverythingWithItsName) {
  FakeStore first, second;
  const auto client = StoreClient::Open(Options({&first, &second}));
  ASSERT_TRUE(client.ok()) << client.status();
  std::string out(5000, '\0');
  const Event pull = (*client)->Pull(11, 0, 0, 2500, out.data());
  ASSERT_TRUE(second.Await([](const auto& state) { return state.waiting.size() == 1; }));
  second.Stop();
  const absl::Status status = pull.Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(status.message(), HasSubstr("store-1"));
  EXPECT_EQ((*client)->Pull(11, 0, 0, 1, out.data()).Wait(), status);
}

TEST(StoreClientTest, TheEndOfAGenerationEndsEverything) {
  FakeStore store;
  const auto client = StoreClient::Open(Options({&store}));
  ASSERT_TRUE(client.ok()) << client.status();
  std::string out(2000, '\0');
  const Event pull = (*client)->Pull(11, 0, 0, 1000, out.data());
  ASSERT_TRUE(store.Await([](const auto& state) { return state.waiting.size() == 1; }));
  store.EndStreams(absl::AbortedError("generation 4 has begun"));
  EXPECT_EQ(pull.Wait().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(pull.Wait().message(), HasSubstr("generation 4 has begun"));
}

TEST(StoreClientTest, AbortEndsWhatIsOnItsWayAndWhatWaits) {
  FakeStore store;
  StoreClientOptions options = Options({&store});
  options.most_pulled = 1000;
  const auto client = StoreClient::Open(options);
  ASSERT_TRUE(client.ok()) << client.status();
  store.With([](auto& state) { state.hold_pushes = true; });
  const std::string data = Values(2500, 1);
  std::string out(5000, '\0');
  auto never = std::make_shared<HostEvent>();
  std::vector<Event> events;
  events.push_back((*client)->Push(11, 0, 0, 2500, data.data()));
  ASSERT_TRUE(store.Await([](const auto& state) { return state.early.size() == 1; }));
  events.push_back((*client)->Push(11, 1, 0, 700, data.data(), Event(never)));
  events.push_back((*client)->Pull(11, 0, 0, 2500, out.data()));
  events.push_back((*client)->Pull(11, 1, 0, 700, out.data(), Event(never)));
  ASSERT_TRUE(store.Await([](const auto& state) { return state.waiting.size() == 1; }));
  (*client)->Abort("rank 1 is gone");
  for (const Event& event : events) {
    EXPECT_EQ(event.Wait(), absl::AbortedError("rank 1 is gone"));
  }
  EXPECT_TRUE(store.Await([](const auto& state) { return state.sessions == 0; }));
  never->Finish(absl::OkStatus());
}

TEST(StoreClientTest, AStoreThatFallsSilentIsNamedWithStepAndChunk) {
  FakeStore store;
  StoreClientOptions options = Options({&store});
  options.stall_timeout = absl::Milliseconds(100);
  const auto client = StoreClient::Open(options);
  ASSERT_TRUE(client.ok()) << client.status();
  std::string out(2000, '\0');
  const absl::Status status = (*client)->Pull(11, 0, 1000, 2000, out.data()).Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("store-0"), HasSubstr("step 11"),
                                      HasSubstr("chunk 1"), HasSubstr("parameters")));
}

TEST(StoreClientTest, WhileTheCoordinatorIsAwayNoStoreIsLate) {
  FakeStore paused, other;
  StoreClientOptions options = Options({&other});
  options.stall_timeout = absl::Milliseconds(100);
  const auto strict = StoreClient::Open(options);
  ASSERT_TRUE(strict.ok()) << strict.status();
  const auto presence = std::make_shared<Presence>(std::chrono::seconds(0));
  options = Options({&paused});
  options.stall_timeout = absl::Milliseconds(100);
  options.presence = presence;
  const auto client = StoreClient::Open(options);
  ASSERT_TRUE(client.ok()) << client.status();
  std::string first(2000, '\0'), second(2000, '\0'), out(2000, '\0');
  const Event waits = (*client)->Pull(11, 0, 0, 1000, first.data());
  // One that began later and has no such excuse is over.
  EXPECT_TRUE(absl::IsDeadlineExceeded((*strict)->Pull(11, 0, 0, 1000, out.data()).Wait()));
  EXPECT_FALSE(waits.Done());
  paused.Publish(11, 0, Values(1000, 2));
  EXPECT_TRUE(waits.Wait().ok()) << waits.Wait();
  EXPECT_EQ(first, Values(1000, 2));

  const Event late = (*client)->Pull(11, 0, 1000, 2000, second.data());
  const auto now = Presence::Clock::now();
  presence->Heard(now, std::chrono::hours(2));
  presence->Heard(now + std::chrono::hours(1), std::chrono::hours(2));
  EXPECT_TRUE(absl::IsDeadlineExceeded(late.Wait())) << late.Wait();
}

TEST(StoreClientTest, GradientsThatAreNotTakenAreNamedToo) {
  FakeStore store;
  store.With([](auto& state) { state.hold_pushes = true; });
  StoreClientOptions options = Options({&store});
  options.stall_timeout = absl::Milliseconds(100);
  const auto client = StoreClient::Open(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const std::string data = Values(700, 1);
  const absl::Status status = (*client)->Push(11, 1, 0, 700, data.data()).Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("gradients"), HasSubstr("chunk 3")));
}

TEST(StoreClientTest, StoresThatLoadHaveMoreTimeForTheBase) {
  FakeStore store;
  StoreClientOptions options = Options({&store});
  options.stall_timeout = absl::Milliseconds(50);
  options.load_timeout = absl::Seconds(30);
  const auto client = StoreClient::Open(options);
  ASSERT_TRUE(client.ok()) << client.status();
  std::string base(2000, '\0'), next(2000, '\0');
  const Event loading = (*client)->Pull(10, 0, 0, 1000, base.data());
  ASSERT_TRUE(store.Await([](const auto& state) { return state.waiting.size() == 1; }));
  store.Publish(10, 0, Values(1000, 2));
  EXPECT_TRUE(loading.Wait().ok());
  EXPECT_EQ((*client)->Pull(11, 0, 0, 1000, next.data()).Wait().code(),
            absl::StatusCode::kDeadlineExceeded);
}

class StoreClientWayTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Ways, StoreClientWayTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Shared" : "Inline"; });

TEST_P(StoreClientWayTest, LargePushesTravelInFrames) {
  FakeStore store;
  StoreClientOptions options = Options({&store});
  options.shared_memory = GetParam();
  options.chunks = ChunkTable();
  options.chunks.chunks = {{0, 0, kChunkElements, true}};
  options.chunks.first = {0, 1};
  options.map.clear_placement();
  options.map.add_placement(0);
  options.dtype = DType::kF32;
  const auto client = StoreClient::Open(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const std::string data = Values(2 * kChunkElements, 3);  // of 2 bytes: 4 a float
  ASSERT_TRUE((*client)->Push(11, 0, 0, kChunkElements, data.data()).Wait().ok());
  std::string staged;
  store.With([&](auto& state) {
    EXPECT_EQ(state.push_frames, 4);
    for (const auto& [at, part] : state.pushed[{11, 0}]) {
      EXPECT_EQ(at * 4, staged.size());
      staged += part;
    }
  });
  EXPECT_EQ(staged, data);
  store.Publish(11, 0, data);
  std::string out(data.size(), '\0');
  ASSERT_TRUE((*client)->Pull(11, 0, 0, kChunkElements, out.data()).Wait().ok());
  EXPECT_EQ(out, data);
  // The transport says that a frame was sent when it likes, but before it sends the next.
  ASSERT_TRUE((*client)->Push(12, 0, 0, kChunkElements, data.data()).Wait().ok());
  const OffloadCounters& counters = (*client)->counters();
  EXPECT_GE(counters.pushed_shared, GetParam() ? data.size() : 0);
  EXPECT_LE(counters.pushed_shared, GetParam() ? 2 * data.size() : 0);
  EXPECT_EQ(counters.pulled_shared, GetParam() ? data.size() : 0);
}

TEST(StoreClientTest, MorePullsThanAStoreReadsAtOnceAreAllAnswered) {
  FakeStore store;
  StoreClientOptions options = Options({&store});
  const auto client = StoreClient::Open(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const std::string whole = Values(1000, 4);
  std::vector<std::string> out(200, std::string(whole.size(), '\0'));
  std::vector<Event> events;
  for (std::string& each : out) events.push_back((*client)->Pull(11, 0, 0, 1000, each.data()));
  ASSERT_TRUE(store.Await([](const auto& state) { return state.waiting.size() == 48; }));
  store.Publish(11, 0, whole);
  for (const Event& event : events) ASSERT_TRUE(event.Wait().ok());
  for (const std::string& each : out) EXPECT_EQ(each, whole);
}

TEST(StoreClientTest, CommitAsksTheCoordinatorWithWhatItMustKnow) {
  FakeStore store;
  FakeCluster cluster;
  ClusterClient coordinator(cluster.address());
  cluster.With([](auto& state) {
    state.commit = [](const v1::CommitStepRequest& request) {
      v1::StepDecision decision;
      decision.set_step(request.record().step());
      decision.set_learning_rate(0.5f);
      return decision;
    };
  });
  StoreClientOptions options = Options({&store});
  options.client = &coordinator;
  const auto client = StoreClient::Open(options);
  ASSERT_TRUE(client.ok()) << client.status();
  v1::StepRecord record;
  record.set_step(11);
  record.set_loss(3.5);
  const auto decision = (*client)->Commit(record, 1234, 99999);
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_EQ(decision->learning_rate(), 0.5f);
  cluster.With([](auto& state) {
    ASSERT_EQ(state.commits.size(), 1u);
    EXPECT_EQ(state.commits[0].fence().generation(), 3u);
    EXPECT_EQ(state.commits[0].record().loss(), 3.5);
    EXPECT_EQ(state.commits[0].epoch(), 2u);
    EXPECT_EQ(state.commits[0].next_sample(), 1234u);
    EXPECT_EQ(state.commits[0].samples(), 99999u);
  });
}

TEST(StoreClientTest, ACommitThatWaitsEndsWithAbort) {
  FakeStore store;
  FakeCluster cluster;
  ClusterClient coordinator(cluster.address());
  StoreClientOptions options = Options({&store});
  options.client = &coordinator;
  const auto client = StoreClient::Open(options);
  ASSERT_TRUE(client.ok()) << client.status();
  v1::StepRecord record;
  record.set_step(11);
  absl::Status status;
  std::thread committer([&] { status = (*client)->Commit(record, 1, 2).status(); });
  ASSERT_TRUE(cluster.Await([](const auto& state) { return !state.commits.empty(); }));
  (*client)->Abort("rank 1 is gone");
  committer.join();
  EXPECT_EQ(status, absl::AbortedError("rank 1 is gone"));
}

}  // namespace
}  // namespace zeroshard
