// What a rank sees when others are late, gone, stuck, or stopped on purpose.
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "common/status_payloads.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/comm/file_rendezvous.h"
#include "tests/worker/comm/ranks.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kShort = absl::Milliseconds(300);

double SecondsOf(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

CommunicatorOptions Options(int rank, int size, absl::Duration connect, absl::Duration operation) {
  return {rank, size, "127.0.0.1", connect, operation};
}

TEST(Connect, ARankThatNeverComesIsNamed) {
  MemoryRendezvous rendezvous;
  auto device = MakeCpuDevice();
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      statuses[r] =
          MakeGlooCommunicator(Options(r, 4, kShort, kShort), &rendezvous, device.get()).status();
    });
  }
  for (auto& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(Text(status), AllOf(HasSubstr("ranks 2, 3 did not come"), HasSubstr("300ms")));
  }
}

TEST(Connect, ARankThatPublishedItsAddressAndDiedIsNamed) {
  for (int dead : {0, 1}) {  // either may be the one that listens
    MemoryRendezvous rendezvous;
    auto device = MakeCpuDevice();
    EXPECT_FALSE(MakeGlooCommunicator(Options(dead, 2, absl::Milliseconds(50), kShort), &rendezvous,
                                      device.get())
                     .ok());
    absl::Status status;
    const double seconds = SecondsOf([&] {
      status = MakeGlooCommunicator(Options(1 - dead, 2, kShort, kShort), &rendezvous, device.get())
                   .status();
    });
    EXPECT_THAT(status.code(),
                AnyOf(absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kUnavailable));
    EXPECT_THAT(Text(status), HasSubstr(absl::StrCat("rank ", dead, " ")));
    EXPECT_LT(seconds, 2.0);
  }
}

TEST(Connect, AddressesOfAnotherWorldAreRefused) {
  MemoryRendezvous rendezvous;
  auto device = MakeCpuDevice();
  ASSERT_TRUE(rendezvous.Put("gloo/1", "00ff").ok());
  const absl::Status status =
      MakeGlooCommunicator(Options(0, 2, kShort, kShort), &rendezvous, device.get()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("rank 1"), HasSubstr("2 bytes")));
}

TEST(Connect, TwoProcessesForOneRankAreRefused) {
  MemoryRendezvous rendezvous;
  auto device = MakeCpuDevice();
  ASSERT_TRUE(rendezvous.Put("gloo/0", "somebody").ok());
  EXPECT_EQ(MakeGlooCommunicator(Options(0, 2, kShort, kShort), &rendezvous, device.get())
                .status()
                .code(),
            absl::StatusCode::kAlreadyExists);
}

TEST(Connect, AHostThatIsNotThisOneIsRefused) {
  MemoryRendezvous rendezvous;
  auto device = MakeCpuDevice();
  CommunicatorOptions options = Options(0, 2, kShort, kShort);
  options.host = "192.0.2.1";  // reserved for documentation
  const absl::Status status = MakeGlooCommunicator(options, &rendezvous, device.get()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Text(status), HasSubstr("192.0.2.1"));
}

TEST(Connect, AnInterfaceMayBeNamedAndTheHostLeftOut) {
  for (const char* host : {"lo", ""}) {
    MemoryRendezvous rendezvous;
    auto device = MakeCpuDevice();
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        CommunicatorOptions options = Options(r, 2, absl::Seconds(10), absl::Seconds(10));
        options.host = host;
        auto made = MakeGlooCommunicator(options, &rendezvous, device.get());
        ASSERT_TRUE(made.ok()) << made.status();
        EXPECT_TRUE((*made)->Barrier(Info()).Wait().ok());
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

TEST(Connect, ALateRankIsWaitedFor) {
  MemoryRendezvous rendezvous;
  auto device = MakeCpuDevice();
  auto join = [&](int r) {
    auto made = MakeGlooCommunicator(Options(r, 3, absl::Seconds(20), absl::Seconds(20)),
                                     &rendezvous, device.get());
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_TRUE((*made)->Barrier(Info()).Wait().ok());
  };
  std::thread first(join, 0), second(join, 2);
  // The others have published, so they are waiting by now or soon.
  ASSERT_TRUE(rendezvous.Get("gloo/0", absl::Seconds(20)).ok());
  ASSERT_TRUE(rendezvous.Get("gloo/2", absl::Seconds(20)).ok());
  join(1);
  first.join();
  second.join();
}

// Finds what others put, and keeps whoever asks until it is released: a rank with it has published
// its address and listens, but never goes on to connect.
class Stall : public Rendezvous {
 public:
  explicit Stall(Rendezvous* shared) : shared_(shared) {}
  absl::Status Put(const std::string& key, const std::string& value) override {
    return shared_->Put(key, value);
  }
  absl::StatusOr<std::string> Get(const std::string&, absl::Duration) override {
    released_.WaitForNotification();
    return absl::CancelledError("released");
  }
  void Release() { released_.Notify(); }

 private:
  Rendezvous* const shared_;
  absl::Notification released_;
};

TEST(Connect, ACancellationEndsItPromptlyWhileAPeerDoesNotConnect) {
  for (int stuck : {0, 1, 2}) {  // the others await its connection, or its greeting
    MemoryRendezvous rendezvous;
    Stall stall(&rendezvous);
    auto device = MakeCpuDevice();
    std::atomic<bool> cancelled{false};
    std::vector<absl::Status> statuses(3);
    std::vector<std::thread> threads;
    for (int r = 0; r < 3; ++r) {
      threads.emplace_back([&, r] {
        CommunicatorOptions options = Options(r, 3, absl::Minutes(5), kShort);
        options.cancelled = &cancelled;
        Rendezvous* meet = &rendezvous;
        if (r == stuck) meet = &stall;
        statuses[r] = MakeGlooCommunicator(options, meet, device.get()).status();
      });
    }
    for (int r = 0; r < 3; ++r) {
      EXPECT_TRUE(rendezvous.Get(absl::StrCat("gloo/", r), absl::Seconds(20)).ok());
    }
    // Time for them to get as far as they can; it must hold wherever they are.
    EXPECT_FALSE(rendezvous.Get("never", absl::Milliseconds(100)).ok());
    const double seconds = SecondsOf([&] {
      cancelled = true;
      for (int r = 0; r < 3; ++r) {
        if (r != stuck) threads[r].join();
      }
    });
    EXPECT_LT(seconds, 5.0);
    stall.Release();
    threads[stuck].join();
    for (int r = 0; r < 3; ++r) {
      if (r == stuck) continue;
      // The one that is a moment later may hear it from the other.
      EXPECT_THAT(statuses[r].code(),
                  AnyOf(absl::StatusCode::kAborted, absl::StatusCode::kUnavailable))
          << statuses[r];
    }
    EXPECT_TRUE(std::any_of(statuses.begin(), statuses.end(), absl::IsAborted));
  }
}

TEST(Operation, OneThatWasDoneJustAsItsTimeWasUpLeavesTheNextAlone) {
  MemoryRendezvous rendezvous;
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      auto mesh = Mesh::Connect(Options(r, 2, absl::Seconds(20), absl::Seconds(20)), &rendezvous);
      ASSERT_TRUE(mesh.ok()) << mesh.status();
      (*mesh)->Begin(absl::ZeroDuration());
      // Several looks of the watcher; nothing is awaited meanwhile.
      EXPECT_FALSE(rendezvous.Get("never", kShort).ok());
      (*mesh)->End();
      (*mesh)->Begin(absl::Seconds(20));
      char byte = 'x';
      auto buffer = (*mesh)->Wrap(&byte, 1);
      ASSERT_TRUE(buffer.ok()) << buffer.status();
      absl::Status status = r == 0 ? (*mesh)->PostSend(**buffer, 1, Mesh::kFirstFreeSlot, 0, 1)
                                   : (*mesh)->PostReceive(**buffer, 0, Mesh::kFirstFreeSlot, 0, 1);
      EXPECT_TRUE(status.ok()) << status;
      Await await{buffer->get(), 1 - r, r == 1, 1};
      status = (*mesh)->AwaitAll(absl::MakeSpan(&await, 1));
      EXPECT_TRUE(status.ok()) << status;
      (*mesh)->End();
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(Operation, ARankThatDoesNotJoinIsNamedByAllOthersAtTheDeadline) {
  Ranks ranks(4, {.operation_timeout = absl::Seconds(1)});
  std::vector<float> data(4 * 100);
  ranks.Each([&](int r) {
    if (r == 2) return;
    std::vector<float> own(4 * 100);
    absl::Status status;
    const double seconds = SecondsOf(
        [&] { status = ranks[r].AllGather(own.data(), 100, DType::kF32, Info()).Wait(); });
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(Text(status), AllOf(HasSubstr("all_gather of blocks.3 (step 7, backward)"),
                                    HasSubstr("for rank 2"), HasSubstr("waited 1.")));
    EXPECT_GE(seconds, 0.95);
    EXPECT_LT(seconds, 3.0);
    // Unusable from now on, and quick to say so.
    absl::Status later;
    EXPECT_LT(SecondsOf([&] { later = ranks[r].Barrier(Info()).Wait(); }), 0.5);
    EXPECT_EQ(later.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(Text(later), AllOf(HasSubstr("barrier"), HasSubstr("failed before")));
  });
  // The late one learns what happened.
  const absl::Status late = ranks[2].AllGather(data.data(), 100, DType::kF32, Info()).Wait();
  EXPECT_FALSE(late.ok());
  EXPECT_THAT(Text(late), AllOf(HasSubstr("left"), HasSubstr("for rank 2")));
}

TEST(Operation, TimeInWhichTheCoordinatorIsAwayIsNotHeldAgainstAnybody) {
  const auto presence = std::make_shared<Presence>(std::chrono::seconds(0));
  Ranks paused(2, {.operation_timeout = kShort, .presence = presence});
  Ranks others(2, {.operation_timeout = kShort});
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

TEST(Operation, AllMissingRanksAreNamed) {
  Ranks ranks(4, {.operation_timeout = kShort});
  const absl::Status status = ranks[1].Barrier(Info()).Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(Text(status), HasSubstr("ranks 0, 2, 3"));
}

TEST(Operation, RanksThatDisagreeAboutAnOperationDoNotMixUpData) {
  Ranks ranks(2, {.operation_timeout = kShort});
  ranks.Each([&](int r) {
    std::vector<float> data(200, 5.0f);
    const absl::Status status = ranks[r].AllGather(data.data(), 50 + r, DType::kF32, Info()).Wait();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(data, ::testing::Each(5.0f));
  });
}

TEST(Operation, WorkBeforeItThatFailedFailsIt) {
  Ranks ranks(2);
  ranks.Each([&](int r) {
    auto compute = MakeHostStream("compute");
    Event broken = compute->Enqueue([] {
      absl::Status status = absl::DataLossError("no gradient");
      MarkNonFinite(&status);
      SetBlamedRank(1, &status);
      return status;
    });
    float x = 0;
    const absl::Status status =
        ranks[r].AllReduce(&x, 1, DType::kF32, Info(), r == 0 ? broken : Event()).Wait();
    EXPECT_THAT(Text(status), HasSubstr("no gradient"));
    if (r == 0) {
      for (const absl::Status& seen : {status, ranks[r].Barrier(Info()).Wait()}) {
        EXPECT_TRUE(IsNonFinite(seen)) << seen;
        EXPECT_EQ(BlamedRank(seen), 1u) << seen;
      }
    } else {
      EXPECT_THAT(Text(status), HasSubstr("rank 0 left"));
    }
  });
}

struct Operation {
  const char* name;
  std::function<Event(Communicator&, std::vector<float>&)> start;
};

std::vector<Operation> OperationsThatNeedRankOne() {
  return {
      {"all_gather",
       [](Communicator& c, std::vector<float>& data) {
         return c.AllGather(data.data(), 1000, DType::kF32, Info());
       }},
      {"reduce_scatter",
       [](Communicator& c, std::vector<float>& data) {
         ReduceScatterArgs args;
         args.input = data.data();
         args.counts = {1000, 1000, 1000};
         args.contributors = 3;
         args.output = data.data() + 1000 * c.rank();
         return c.ReduceScatter(args, Info());
       }},
      {"all_reduce",
       [](Communicator& c, std::vector<float>& data) {
         return c.AllReduce(data.data(), 3000, DType::kF32, Info());
       }},
      {"broadcast",
       [](Communicator& c, std::vector<float>& data) {
         return c.Broadcast(data.data(), 12000, 1, Info());
       }},
      {"recv", [](Communicator& c,
                  std::vector<float>& data) { return c.Recv(data.data(), 12000, 1, Info()); }},
      {"send", [](Communicator& c,
                  std::vector<float>& data) { return c.Send(data.data(), 12000, 1, Info()); }},
      {"barrier", [](Communicator& c, std::vector<float>&) { return c.Barrier(Info()); }},
  };
}

TEST(Death, ACommunicatorThatIsDestroyedIsNoticedPromptlyInEveryOperation) {
  for (const Operation& operation : OperationsThatNeedRankOne()) {
    SCOPED_TRACE(operation.name);
    Ranks ranks(3);
    std::vector<std::vector<float>> data(3, std::vector<float>(3000));
    std::vector<Event> events(3);
    for (int r : {0, 2}) events[r] = operation.start(ranks[r], data[r]);
    const double seconds = SecondsOf([&] {
      ranks.Destroy(1);
      for (int r : {0, 2}) {
        const absl::Status status = events[r].Wait();
        EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
        EXPECT_THAT(Text(status),
                    AllOf(AnyOf(HasSubstr("rank 1 is gone"), HasSubstr("ranks 0, 1 are gone"),
                                HasSubstr("ranks 1, 2 are gone")),
                          HasSubstr(operation.name), HasSubstr("blocks.3 (step 7, backward)")));
      }
    });
    EXPECT_LT(seconds, 2.0);
  }
}

TEST(Death, RanksThatAreDoneMayLeaveWhileOthersStillFinish) {
  for (int round = 0; round < 6; ++round) {
    Ranks ranks(3);
    ranks.Each([&](int r) {
      std::vector<float> data(3 * 300000, static_cast<float>(r));
      const absl::Status status =
          ranks[r].AllGather(data.data(), 300000, DType::kF32, Info()).Wait();
      EXPECT_TRUE(status.ok()) << status;
      ranks.Destroy(r);
      for (int p = 0; p < 3; ++p) EXPECT_EQ(data[p * 300000 + 299999], static_cast<float>(p));
    });
  }
}

TEST(Abort, EndsAPendingOperationAndTellsThePeersWhy) {
  Ranks ranks(3);
  std::vector<float> data(3000);
  Event pending = ranks[0].AllGather(data.data(), 1000, DType::kF32, Info());
  Event queued = ranks[0].Barrier(Info());
  const double seconds = SecondsOf([&] {
    ranks[0].Abort("generation 8 begins");
    for (const Event& event : {pending, queued, ranks[0].Barrier(Info())}) {
      EXPECT_EQ(event.Wait().code(), absl::StatusCode::kAborted);
      EXPECT_THAT(Text(event.Wait()), HasSubstr("generation 8 begins"));
    }
    const absl::Status peer = ranks[2].Barrier(Info()).Wait();
    EXPECT_EQ(peer.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(Text(peer), AllOf(HasSubstr("rank 0 left"), HasSubstr("generation 8 begins")));
  });
  EXPECT_LT(seconds, 2.0);
  EXPECT_TRUE(pending.Done());
}

TEST(Abort, OfAnIdleCommunicatorFailsWhatFollowsAndIsHarmlessTwice) {
  Ranks ranks(1);
  ranks[0].Abort("first");
  ranks[0].Abort("second");
  const absl::Status status = ranks[0].Barrier(Info()).Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("first"), Not(HasSubstr("second"))));
}

TEST(Destructor, EndsPendingOperations) {
  Ranks ranks(2);
  std::vector<float> data(2000);
  Event first = ranks[0].AllGather(data.data(), 1000, DType::kF32, Info());
  Event second = ranks[0].Barrier(Info());
  EXPECT_LT(SecondsOf([&] { ranks.Destroy(0); }), 2.0);
  EXPECT_EQ(first.Wait().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(second.Wait().code(), absl::StatusCode::kAborted);
}

// Rank 1 of 3 in a process of its own, in one big all-gather after the other.
class Child {
 public:
  explicit Child(const std::string& folder) : pid_(fork()) {
    if (pid_ != 0) return;
    FileRendezvous rendezvous(folder);
    auto device = MakeCpuDevice();
    auto made = MakeGlooCommunicator(Options(1, 3, absl::Seconds(20), absl::Seconds(20)),
                                     &rendezvous, device.get());
    if (!made.ok()) _exit(2);
    std::vector<float> data(3 * kCount);
    while ((*made)->AllGather(data.data(), kCount, DType::kF32, Info()).Wait().ok()) {
    }
    _exit(3);
  }
  ~Child() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    int status = 0;
    waitpid(pid_, &status, 0);
  }
  void Signal(int number) { EXPECT_EQ(kill(pid_, number), 0); }
  static constexpr int64_t kCount = 2'000'000;

 private:
  const pid_t pid_;
};

// Ranks 0 and 2 gather with the child until it gets `signal`; what each of them saw in the end, and
// how long the last operation took.
void RunUntil(int signal, absl::Duration operation_timeout, std::vector<absl::Status>* seen,
              std::vector<double>* seconds) {
  const std::string folder = testing::TempDir() + "/comm_faults_" + std::to_string(getpid());
  std::filesystem::create_directories(folder);
  Child child(folder);
  seen->resize(3);
  seconds->resize(3);
  FileRendezvous rendezvous(folder);
  auto device = MakeCpuDevice();
  std::atomic<int> rounds{0};
  std::vector<std::thread> threads;
  for (int r : {0, 2}) {
    threads.emplace_back([&, r] {
      auto made = MakeGlooCommunicator(Options(r, 3, absl::Seconds(20), operation_timeout),
                                       &rendezvous, device.get());
      ASSERT_TRUE(made.ok()) << made.status();
      std::vector<float> data(3 * Child::kCount);
      absl::Status status;
      while (status.ok()) {
        (*seconds)[r] = SecondsOf([&] {
          Event event = (*made)->AllGather(data.data(), Child::kCount, DType::kF32, Info());
          if (r == 0 && ++rounds == 3) child.Signal(signal);
          status = event.Wait();
        });
      }
      (*seen)[r] = status;
    });
  }
  for (auto& thread : threads) thread.join();
  std::filesystem::remove_all(folder);
}

TEST(Death, AProcessKilledInACollectiveIsNamedPromptly) {
  std::vector<absl::Status> seen;
  std::vector<double> seconds;
  RunUntil(SIGKILL, absl::Seconds(20), &seen, &seconds);
  for (int r : {0, 2}) {
    EXPECT_EQ(seen[r].code(), absl::StatusCode::kUnavailable) << seen[r];
    // The other rank leaves too, with a word where it gets through in time.
    EXPECT_THAT(Text(seen[r]), AnyOf(HasSubstr("rank 1 is gone"), HasSubstr("ranks 0, 1 are gone"),
                                     HasSubstr("ranks 1, 2 are gone")));
    EXPECT_LT(seconds[r], 2.0);
  }
}

TEST(Death, AProcessThatIsStoppedIsNamedAtTheDeadline) {
  std::vector<absl::Status> seen;
  std::vector<double> seconds;
  RunUntil(SIGSTOP, absl::Seconds(1), &seen, &seconds);
  for (int r : {0, 2}) {
    EXPECT_EQ(seen[r].code(), absl::StatusCode::kDeadlineExceeded) << seen[r];
    // The other may have been in the operation before when the child stopped.
    EXPECT_THAT(Text(seen[r]), AnyOf(HasSubstr("for rank 1"), HasSubstr("for ranks 0, 1"),
                                     HasSubstr("for ranks 1, 2")));
    EXPECT_LT(seconds[r], 4.0);
  }
}

}  // namespace
}  // namespace zeroshard
