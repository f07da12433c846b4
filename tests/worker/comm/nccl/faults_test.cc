// What a rank sees when others are late, gone or stuck, and when it is stopped on purpose.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/status_payloads.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/comm/nccl/nccl_ranks.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr absl::Duration kShort = absl::Milliseconds(300);

double SecondsOf(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Where a process would end: the message, and on to the next line.
class Exits {
 public:
  NcclTuning Tuning(absl::Duration timeout) {
    return {.ending = {.timeout = timeout,
                       .grace = kShort,
                       .exit_process = [this](const std::string& message) {
                         std::lock_guard lock(mutex_);
                         messages_.push_back(message);
                         changed_.notify_all();
                       }}};
  }
  std::vector<std::string> messages() {
    std::lock_guard lock(mutex_);
    return messages_;
  }
  std::vector<std::string> Await() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !messages_.empty(); });
    return messages_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> messages_;
};

class NcclConnect : public ::testing::Test {
 protected:
  ~NcclConnect() override { EXPECT_THAT(nccl_.violations(), IsEmpty()); }

  absl::StatusOr<std::unique_ptr<Communicator>> Join(int rank, int size, absl::Duration timeout,
                                                     Rendezvous* rendezvous,
                                                     const std::atomic<bool>* cancelled = nullptr,
                                                     const NcclTuning& tuning = {}) {
    return MakeNcclCommunicator(
        CommunicatorOptions{rank, size, "", timeout, absl::Seconds(20), cancelled}, tuning,
        nccl_.Api(), rendezvous, device_.get());
  }
  absl::Status JoinStatus(int rank, int size, absl::Duration timeout = kShort) {
    return Join(rank, size, timeout, &rendezvous_).status();
  }

  FakeNccl nccl_;
  MemoryRendezvous rendezvous_;
  std::unique_ptr<Device> device_ = MakeCpuDevice();
};

TEST_F(NcclConnect, RanksThatNeverComeAreNamed) {
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) threads.emplace_back([&, r] { statuses[r] = JoinStatus(r, 4); });
  for (auto& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(Text(status),
                AllOf(HasSubstr("of 4 could not join"), HasSubstr("300ms"),
                      HasSubstr("did not come: rank 2 (rendezvous key \"nccl/2\"), rank 3 "
                                "(rendezvous key \"nccl/3\")")));
  }
  EXPECT_EQ(nccl_.aborted(), 2);
}

TEST_F(NcclConnect, ARankZeroThatNeverComesIsNamed) {
  const absl::Status status = JoinStatus(1, 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("rank 0, whose NCCL id"), HasSubstr("\"nccl/0\"")));
}

TEST_F(NcclConnect, ARankThatPublishedItsKeyAndDiedIsTold) {
  ASSERT_TRUE(rendezvous_.Put("nccl/1", "2").ok());
  const absl::Status status = JoinStatus(0, 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(Text(status), HasSubstr("all ranks published their keys"));
}

TEST_F(NcclConnect, ALateRankIsWaitedFor) {
  auto join = [&](int r) {
    auto made = Join(r, 3, absl::Seconds(20), &rendezvous_);
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_TRUE((*made)->Barrier(Info()).Wait().ok());
  };
  std::thread first(join, 0), second(join, 2);
  // The others have published, so they are waiting by now or soon.
  ASSERT_TRUE(rendezvous_.Get("nccl/0", absl::Seconds(20)).ok());
  ASSERT_TRUE(rendezvous_.Get("nccl/2", absl::Seconds(20)).ok());
  join(1);
  first.join();
  second.join();
}

TEST_F(NcclConnect, AnIdOfAnotherBuildOrWorldIsRefused) {
  ASSERT_TRUE(rendezvous_.Put("nccl/0", "2 00ff").ok());
  absl::Status status = JoinStatus(1, 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("rank 0"), HasSubstr("2 bytes"), HasSubstr("128")));
  status = JoinStatus(2, 3);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("\"2\" ranks"), HasSubstr("told 3")));
}

TEST_F(NcclConnect, APeerOfAnotherWorldSizeIsToldByRankZero) {
  ASSERT_TRUE(rendezvous_.Put("nccl/1", "5").ok());
  const absl::Status status = JoinStatus(0, 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("rank 1"), HasSubstr("\"5\" ranks")));
}

TEST_F(NcclConnect, TwoProcessesForOneRankAreRefused) {
  ASSERT_TRUE(rendezvous_.Put("nccl/1", "somebody").ok());
  EXPECT_EQ(JoinStatus(1, 2).code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(NcclConnect, AnOldLibraryIsRefused) {
  nccl_.version = 21805;
  const absl::Status status = JoinStatus(0, 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("21805"), HasSubstr("21900")));
}

TEST_F(NcclConnect, WhatNcclRefusesComesWithItsRemedy) {
  nccl_.refuse_init = true;
  const absl::Status status = JoinStatus(0, 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("ncclCommInitRankConfig"), HasSubstr("fake error 5"),
                                  HasSubstr("a GPU of its own")));
}

TEST_F(NcclConnect, AnErrorWhileConnectingEndsItAndNamesWhoIsMissing) {
  nccl_.SetError(0, NcclResult::kSystemError);
  absl::Status status;
  EXPECT_LT(SecondsOf([&] { status = JoinStatus(0, 2, absl::Minutes(5)); }), 5.0);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("fake error 2"), HasSubstr("NCCL_SOCKET_IFNAME"),
                                  HasSubstr("rank 1 (rendezvous key \"nccl/1\")")));
  EXPECT_EQ(nccl_.aborted(), 1);
}

TEST_F(NcclConnect, ACancellationEndsItPromptly) {
  std::atomic<bool> cancelled{false};
  absl::Status status;
  std::thread waiting(
      [&] { status = Join(0, 2, absl::Minutes(5), &rendezvous_, &cancelled).status(); });
  ASSERT_TRUE(rendezvous_.Get("nccl/0", absl::Seconds(20)).ok());
  const double seconds = SecondsOf([&] {
    cancelled = true;
    waiting.join();
  });
  EXPECT_LT(seconds, 5.0);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_EQ(nccl_.aborted(), 1);
}

TEST_F(NcclConnect, AnAbortThatHangsEndsTheProcess) {
  Exits exits;
  nccl_.HangAborts();
  const absl::Status status =
      Join(0, 2, kShort, &rendezvous_, nullptr, exits.Tuning(kShort)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(exits.messages(),
              ElementsAre(AllOf(HasSubstr("rank 0 of 2: ncclCommAbort did not return within 300ms"),
                                HasSubstr("did not connect all ranks"))));
  nccl_.Release();
  nccl_.AwaitAborts(1);
}

// Each generation has a rendezvous of its own, so a rank of an older one meets nobody there.
TEST_F(NcclConnect, AnIdOfAnOlderGenerationIsNotUsed) {
  EXPECT_FALSE(JoinStatus(0, 2).ok());  // leaves its id behind
  MemoryRendezvous next;
  absl::Status stale;
  std::thread old([&] { stale = JoinStatus(1, 2); });
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      auto made = Join(r, 2, absl::Seconds(20), &next);
      ASSERT_TRUE(made.ok()) << made.status();
      EXPECT_TRUE((*made)->Barrier(Info()).Wait().ok());
    });
  }
  for (auto& thread : threads) thread.join();
  old.join();
  // The id that it found is of ranks that are gone.
  EXPECT_TRUE(absl::IsDeadlineExceeded(stale)) << stale;
  EXPECT_NE(*rendezvous_.Get("nccl/0", kShort), *next.Get("nccl/0", kShort));
}

TEST(NcclOperations, ARankThatDoesNotJoinRunsIntoTheDeadline) {
  NcclRanks ranks(3, {.operation_timeout = absl::Seconds(1)});
  ranks.Each([&](int r) {
    if (r == 2) return;
    std::vector<float> own(3 * 100);
    absl::Status status;
    const double seconds = SecondsOf(
        [&] { status = ranks[r].AllGather(own.data(), 100, DType::kF32, Info()).Wait(); });
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(Text(status), AllOf(HasSubstr("all_gather of blocks.3 (step 7, backward) on rank"),
                                    HasSubstr("of 3: waited 1"), HasSubstr("limit is 1s")));
    EXPECT_GE(seconds, 0.95);
    EXPECT_LT(seconds, 3.0);
    // Unusable from now on, and quick to say so.
    absl::Status later;
    EXPECT_LT(SecondsOf([&] { later = ranks[r].Barrier(Info()).Wait(); }), 0.5);
    EXPECT_EQ(later.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(Text(later), AllOf(HasSubstr("barrier"), HasSubstr("failed before")));
  });
  EXPECT_EQ(ranks.nccl().aborted(), 2);
}

TEST(NcclOperations, AGroupThatNcclNeverPutsOnTheStreamRunsIntoTheDeadline) {
  NcclRanks ranks(2, {.operation_timeout = kShort});
  ranks.nccl().StallGroups();
  ranks.Each([&](int r) {
    const Event first = ranks[r].Barrier(Info());
    const Event queued = ranks[r].Barrier(Info());
    EXPECT_TRUE(absl::IsDeadlineExceeded(first.Wait())) << first.Wait();
    EXPECT_TRUE(absl::IsDeadlineExceeded(queued.Wait())) << queued.Wait();
    EXPECT_THAT(Text(queued.Wait()), HasSubstr("not started"));
  });
}

TEST(NcclOperations, HostGathersHaveTheDeadlineToo) {
  NcclRanks ranks(2, {.operation_timeout = kShort});
  std::vector<char> all(2, 'x');
  const absl::Status status = ranks[0].AllGatherHost(all.data(), 1, Info());
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(all, Each('x'));
}

TEST(NcclOperations, TimeInWhichTheCoordinatorIsAwayIsNotHeldAgainstAnybody) {
  const auto presence = std::make_shared<Presence>(std::chrono::seconds(0));
  NcclRanks paused(2, {.operation_timeout = kShort, .presence = presence});
  NcclRanks others(2, {.operation_timeout = kShort});
  std::vector<float> first(2, 1.0f), second(2, 2.0f);
  const Event waits = paused[0].AllGather(first.data(), 1, DType::kF32, Info());
  // One that began later and has no such excuse is over.
  std::vector<float> data(2);
  EXPECT_TRUE(
      absl::IsDeadlineExceeded(others[0].AllGather(data.data(), 1, DType::kF32, Info()).Wait()));
  EXPECT_FALSE(waits.Done());
  const Event joins = paused[1].AllGather(second.data(), 1, DType::kF32, Info());
  EXPECT_TRUE(waits.Wait().ok()) << waits.Wait();
  EXPECT_TRUE(joins.Wait().ok()) << joins.Wait();
  EXPECT_EQ(first[1], 2.0f);

  // While the coordinator is there a rank that does not come is late as ever.
  const Event late = paused[0].AllGather(first.data(), 1, DType::kF32, Info());
  const auto now = Presence::Clock::now();
  presence->Heard(now, std::chrono::hours(2));
  presence->Heard(now + std::chrono::hours(1), std::chrono::hours(2));
  EXPECT_TRUE(absl::IsDeadlineExceeded(late.Wait())) << late.Wait();
}

TEST(NcclOperations, TimeThatTheWorkBeforeItTakesDoesNotCount) {
  NcclRanks ranks(2, {.operation_timeout = kShort});
  const auto on_gpu = std::make_shared<FakeGpuEvent>();
  const auto on_host = std::make_shared<HostEvent>();
  std::vector<std::vector<float>> data(2, std::vector<float>(2));
  std::vector<Event> events;
  for (int r = 0; r < 2; ++r) {
    events.push_back(ranks[r].AllGather(data[r].data(), 1, DType::kF32, Info(), Event(on_gpu)));
    events.push_back(ranks[r].AllGather(data[r].data(), 1, DType::kF32, Info(), Event(on_host)));
  }
  MemoryRendezvous nobody;
  EXPECT_FALSE(nobody.Get("never", 2 * kShort).ok());
  on_gpu->Finish(absl::OkStatus());
  EXPECT_TRUE(events[0].Wait().ok()) << events[0].Wait();
  EXPECT_FALSE(nobody.Get("never", 2 * kShort).ok());
  on_host->Finish(absl::OkStatus());
  for (const Event& event : events) EXPECT_TRUE(event.Wait().ok()) << event.Wait();
}

TEST(NcclOperations, WorkBeforeItThatFailedFailsIt) {
  for (bool on_gpu : {false, true}) {
    NcclRanks ranks(2);
    const auto broken = on_gpu ? std::make_shared<FakeGpuEvent>() : std::make_shared<HostEvent>();
    std::vector<float> data(2, 5.0f);
    const std::vector<Event> events = {
        ranks[0].AllGather(data.data(), 1, DType::kF32, Info(), Event(broken)),
        ranks[0].Barrier(Info())};
    absl::Status status = absl::DataLossError("no gradient");
    MarkNonFinite(&status);
    SetBlamedRank(1, &status);
    broken->Finish(status);
    for (const Event& event : events) {
      const absl::Status seen = event.Wait();
      EXPECT_EQ(seen.code(), absl::StatusCode::kDataLoss) << seen;
      EXPECT_THAT(Text(seen), AllOf(HasSubstr("the work before it failed"),
                                    HasSubstr("all_gather of blocks.3"), HasSubstr("no gradient")));
      EXPECT_TRUE(IsNonFinite(seen)) << seen;
      EXPECT_EQ(BlamedRank(seen), 1u) << seen;
    }
  }
}

TEST(NcclOperations, AnErrorOfNcclEndsEverythingPromptlyAndLeavesMemoryAlone) {
  NcclRanks ranks(3);
  std::vector<float> data(3, 5.0f), queued(3, 6.0f);
  const Event pending = ranks[0].AllGather(data.data(), 1, DType::kF32, Info());
  const Event behind = ranks[0].AllGather(queued.data(), 1, DType::kF32, Info());
  const double seconds = SecondsOf([&] {
    ranks.nccl().SetError(0, NcclResult::kRemoteError);
    for (const Event& event : {pending, behind, ranks[0].Barrier(Info())}) {
      EXPECT_EQ(event.Wait().code(), absl::StatusCode::kUnavailable) << event.Wait();
      EXPECT_THAT(Text(event.Wait()),
                  AllOf(HasSubstr("(step 7, backward) on rank 0 of 3"), HasSubstr("fake error 6"),
                        HasSubstr("a peer is gone")));
    }
  });
  EXPECT_LT(seconds, 2.0);
  EXPECT_EQ(ranks.nccl().aborted(), 1);
  // The others come now: nothing of theirs arrives here, and nothing of this rank's there.
  std::vector<float> one(3, 1.0f), two(3, 2.0f);
  const Event first = ranks[1].AllGather(one.data(), 1, DType::kF32, Info());
  const Event second = ranks[2].AllGather(two.data(), 1, DType::kF32, Info());
  ranks[1].Abort("enough");
  ranks[2].Abort("enough");
  EXPECT_FALSE(first.Wait().ok());
  EXPECT_FALSE(second.Wait().ok());
  EXPECT_THAT(data, Each(5.0f));
  EXPECT_THAT(queued, Each(6.0f));
  EXPECT_THAT(one, Each(1.0f));
}

TEST(NcclOperations, AnErrorWhileNothingIsUnderWayIsFoundByTheNext) {
  NcclRanks ranks(2);
  ranks.nccl().SetError(1, NcclResult::kInternalError);
  const absl::Status status = ranks[1].Barrier(Info()).Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_THAT(Text(status), AllOf(HasSubstr("fake error 3"), HasSubstr("barrier")));
}

TEST(NcclAbort, EndsPendingAndLaterOperationsWithItsReason) {
  NcclRanks ranks(3);
  std::vector<float> data(3000, 5.0f);
  const Event pending = ranks[0].AllGather(data.data(), 1000, DType::kF32, Info());
  const Event queued = ranks[0].Barrier(Info());
  const double seconds = SecondsOf([&] {
    std::thread other([&] { ranks[0].Abort("generation 8 begins"); });
    for (const Event& event : {pending, queued}) {
      EXPECT_EQ(event.Wait().code(), absl::StatusCode::kAborted) << event.Wait();
      EXPECT_THAT(Text(event.Wait()), HasSubstr("generation 8 begins"));
    }
    other.join();
  });
  EXPECT_LT(seconds, 2.0);
  EXPECT_TRUE(pending.Done());
  ranks[0].Abort("later");
  const absl::Status later = ranks[0].Barrier(Info()).Wait();
  EXPECT_EQ(later.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(Text(later), AllOf(HasSubstr("generation 8 begins"), Not(HasSubstr("later"))));
  EXPECT_THAT(data, Each(5.0f));
  EXPECT_EQ(ranks.nccl().aborted(), 1);
}

TEST(NcclAbort, EndsAnOperationThatWaitsForTheHost) {
  NcclRanks ranks(2);
  const auto never = std::make_shared<HostEvent>();
  float x = 0;
  const Event waits = ranks[0].AllReduce(&x, 1, DType::kF32, Info(), Event(never));
  ranks[0].Abort("stop");
  EXPECT_EQ(waits.Wait().code(), absl::StatusCode::kAborted);
}

TEST(NcclAbort, OfASingleRankFailsWhatFollows) {
  NcclRanks ranks(1);
  EXPECT_TRUE(ranks[0].Barrier(Info()).Wait().ok());
  ranks[0].Abort("stop");
  EXPECT_EQ(ranks[0].Barrier(Info()).Wait().code(), absl::StatusCode::kAborted);
  char byte = 0;
  EXPECT_EQ(ranks[0].AllGatherHost(&byte, 1, Info()).code(), absl::StatusCode::kAborted);
}

TEST(NcclAbort, ThatHangsEndsTheProcess) {
  Exits exits;
  NcclRanks ranks(2, {.tuning = exits.Tuning(kShort)});
  ranks.nccl().HangAborts();
  std::vector<float> data(2);
  const Event pending = ranks[0].AllGather(data.data(), 1, DType::kF32, Info());
  ranks.nccl().AwaitKernels(1);
  ranks[0].Abort("generation 8 begins");
  EXPECT_EQ(pending.Wait().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(exits.Await(),
              ElementsAre(AllOf(HasSubstr("rank 0 of 2: ncclCommAbort did not return within 300ms"),
                                HasSubstr("generation 8 begins"), HasSubstr("process exits"))));
  ranks.nccl().Release();
  ranks.nccl().AwaitAborts(1);
}

TEST(NcclAbort, AfterWhichTheGpuGoesOnEndsTheProcess) {
  Exits exits;
  NcclRanks ranks(2, {.tuning = exits.Tuning(kShort)});
  ranks.nccl().KeepKernels();
  std::vector<float> data(2);
  const Event pending = ranks[0].AllGather(data.data(), 1, DType::kF32, Info());
  ranks.nccl().AwaitKernels(1);
  ranks[0].Abort("generation 8 begins");
  EXPECT_EQ(pending.Wait().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(exits.Await(), ElementsAre(AllOf(HasSubstr("rank 0 of 2: the GPU still works"),
                                               HasSubstr("generation 8 begins"))));
  ranks.nccl().Release();
}

TEST(NcclDestructor, EndsPendingOperations) {
  NcclRanks ranks(2);
  std::vector<float> data(2000);
  const Event first = ranks[0].AllGather(data.data(), 1000, DType::kF32, Info());
  const Event second = ranks[0].Barrier(Info());
  EXPECT_LT(SecondsOf([&] { ranks.Destroy(0); }), 2.0);
  EXPECT_EQ(first.Wait().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(second.Wait().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ranks.nccl().aborted(), 1);
}

TEST(NcclDestructor, RanksThatAreDoneLeaveTogether) {
  NcclRanks ranks(3);
  ranks.Each([&](int r) {
    EXPECT_TRUE(ranks[r].Barrier(Info()).Wait().ok());
    ranks.Destroy(r);
  });
  EXPECT_EQ(ranks.nccl().destroyed(), 3);
  EXPECT_EQ(ranks.nccl().aborted(), 0);
}

TEST(NcclDestructor, DoesNotWaitLongForPeersThatStay) {
  Exits exits;
  NcclRanks ranks(2, {.tuning = exits.Tuning(absl::Seconds(10))});
  EXPECT_LT(SecondsOf([&] { ranks.Destroy(0); }), 2.0);
  EXPECT_EQ(ranks.nccl().aborted(), 1);
  EXPECT_THAT(exits.messages(), IsEmpty());
}

}  // namespace
}  // namespace zeroshard
