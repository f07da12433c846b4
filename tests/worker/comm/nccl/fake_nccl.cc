#include "tests/worker/comm/nccl/fake_nccl.h"

#include <bit>
#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/kernels/half.h"

namespace zeroshard {

struct NcclStream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  bool closing = false;
  std::atomic<NcclComm*> pending{nullptr};  // has a group that is not on the stream yet
  std::thread thread;

  NcclStream() : thread([this] { Loop(); }) {}
  ~NcclStream() {
    {
      std::lock_guard lock(mutex);
      closing = true;
    }
    changed.notify_all();
    thread.join();
  }
  void Push(std::function<void()> item) {
    {
      std::lock_guard lock(mutex);
      work.push_back(std::move(item));
    }
    changed.notify_all();
  }
  void Loop() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return closing || !work.empty(); });
      if (work.empty()) return;
      const std::function<void()> item = std::move(work.front());
      work.pop_front();
      lock.unlock();
      item();
      lock.lock();
    }
  }
};

struct NcclMark {
  struct Moment {
    std::atomic<bool> reached{false};
    std::chrono::steady_clock::time_point at;
  };
  std::shared_ptr<Moment> moment = std::make_shared<Moment>();  // the stream's too
};

struct NcclComm {
  FakeNccl* world = nullptr;
  std::string id;
  int rank = 0;
  int gpu = FakeNccl::kOwnGpu;
  uint64_t next = 0;  // collective, as its stream comes to them
  bool stopped = false;
  bool over = false;  // aborted or destroyed: not to be used again
  bool connected = false;
  bool finalizing = false;
  std::map<void*, size_t> registered;
  // A group of calls between GroupEnd and the moment when it is on the stream.
  NcclStream* stream = nullptr;
  std::vector<FakeCall> pending;
  int looks = 0;
};

namespace {

thread_local int group_depth = 0;
thread_local NcclComm* group_comm = nullptr;
thread_local NcclStream* group_stream = nullptr;
thread_local std::vector<FakeCall> group_calls;

constexpr int kLooks = 3;  // of AsyncError, until a group is on the stream

float Value(const void* from, DType type, int64_t i) {
  if (type == DType::kF32) return static_cast<const float*>(from)[i];
  if (type == DType::kF16) return FloatOf(static_cast<const Fp16*>(from)[i]);
  return std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(from)[i]} << 16);
}

void Store(float value, DType type, void* to, int64_t i) {
  if (type == DType::kF32) {
    static_cast<float*>(to)[i] = value;
  } else if (type == DType::kF16) {
    static_cast<Fp16*>(to)[i] = HalfOf(value);
  } else {  // sums of these tests that NCCL makes are exact
    static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  }
}

}  // namespace

class FakeNcclApi : public NcclApi {
 public:
  FakeNcclApi(FakeNccl* world, int gpu) : world_(*world), gpu_(gpu) {}

  void EnterThread() override {}
  NcclResult Version(int* version) override {
    *version = world_.version;
    return NcclResult::kSuccess;
  }
  NcclResult MakeUniqueId(std::string* id) override {
    std::lock_guard lock(world_.mutex_);
    *id = absl::StrCat("id ", ++world_.ids_);
    id->resize(kNcclIdBytes);
    return NcclResult::kSuccess;
  }
  NcclResult InitRank(int size, const std::string& id, int rank, NcclComm** comm) override {
    if (world_.refuse_init) return NcclResult::kInvalidUsage;
    std::lock_guard lock(world_.mutex_);
    FakeNccl::Clique& clique = world_.cliques_[id];
    clique.size = size;
    if (!clique.joined.insert(rank).second) world_.Violation("a rank came twice");
    world_.comms_.push_back(std::make_unique<NcclComm>());
    *comm = world_.comms_.back().get();
    (*comm)->world = &world_;
    (*comm)->id = id;
    (*comm)->rank = rank;
    (*comm)->gpu = gpu_;
    return NcclResult::kInProgress;
  }

  NcclResult AsyncError(NcclComm* comm, NcclResult* state) override {
    std::lock_guard lock(world_.mutex_);
    CheckAlive(comm, "AsyncError");
    const FakeNccl::Clique& clique = world_.cliques_[comm->id];
    if (static_cast<int>(clique.joined.size()) == clique.size) comm->connected = true;
    *state = NcclResult::kSuccess;
    if (auto error = world_.errors_.find(comm->rank); error != world_.errors_.end()) {
      *state = error->second;
    } else if (!comm->connected ||
               (comm->finalizing && static_cast<int>(clique.finalized.size()) < clique.size)) {
      *state = NcclResult::kInProgress;
    } else if (comm->stream != nullptr) {
      *state = NcclResult::kInProgress;
      if (++comm->looks >= kLooks && !world_.stall_groups_) PutPending(comm);
    }
    return NcclResult::kSuccess;
  }

  NcclResult Finalize(NcclComm* comm) override {
    std::lock_guard lock(world_.mutex_);
    CheckReady(comm, "Finalize");
    comm->finalizing = true;
    world_.cliques_[comm->id].finalized.insert(comm->rank);
    return NcclResult::kInProgress;
  }
  NcclResult Destroy(NcclComm* comm) override {
    std::lock_guard lock(world_.mutex_);
    CheckReady(comm, "Destroy");
    if (!comm->registered.empty()) world_.Violation("Destroy while memory is registered");
    comm->over = true;
    ++world_.destroyed_;
    return NcclResult::kSuccess;
  }
  NcclResult Abort(NcclComm* comm) override {
    std::unique_lock lock(world_.mutex_);
    CheckAlive(comm, "Abort");
    comm->over = true;
    if (world_.hang_aborts_) {
      ++world_.hung_;
      world_.changed_.notify_all();
      world_.changed_.wait(lock, [this] { return !world_.hang_aborts_; });
    }
    ++world_.aborted_;
    comm->stopped = true;
    world_.cliques_[comm->id].joined.erase(comm->rank);
    if (comm->stream != nullptr) comm->stream->pending = nullptr;
    world_.changed_.notify_all();
    return NcclResult::kSuccess;
  }
  std::string Describe(NcclResult result, NcclComm*) override {
    return absl::StrCat("fake error ", static_cast<int>(result));
  }

  NcclResult Register(NcclComm* comm, void* data, size_t bytes, void** handle) override {
    std::lock_guard lock(world_.mutex_);
    CheckReady(comm, "Register");
    if (world_.refuses_registrations_) return NcclResult::kInvalidUsage;
    if (!comm->registered.emplace(data, bytes).second) world_.Violation("registered twice");
    *handle = data;
    return NcclResult::kSuccess;
  }
  NcclResult Deregister(NcclComm* comm, void* handle) override {
    std::lock_guard lock(world_.mutex_);
    CheckReady(comm, "Deregister");
    if (comm->registered.erase(handle) == 0) world_.Violation("Deregister of what is not");
    return NcclResult::kSuccess;
  }

  NcclResult GroupStart() override {
    ++group_depth;
    return NcclResult::kSuccess;
  }
  NcclResult GroupEnd() override {
    --group_depth;
    std::vector<FakeCall> calls = std::exchange(group_calls, {});
    if (calls.empty()) return NcclResult::kSuccess;
    std::lock_guard lock(world_.mutex_);
    CheckReady(group_comm, "GroupEnd");
    ++world_.groups_[group_comm->rank];
    group_comm->pending = std::move(calls);
    group_comm->stream = group_stream;
    group_comm->looks = 0;
    group_stream->pending = group_comm;
    return NcclResult::kInProgress;
  }

  NcclResult AllGather(const void* send, void* receive, int64_t count, DType type, NcclComm* comm,
                       NcclStream* stream) override {
    return Add({FakeCall::kAllGather, send, receive, count, type}, comm, stream);
  }
  NcclResult ReduceScatter(const void* send, void* receive, int64_t count, DType type,
                           NcclComm* comm, NcclStream* stream) override {
    return Add({FakeCall::kReduceScatter, send, receive, count, type}, comm, stream);
  }
  NcclResult AllReduce(const void* send, void* receive, int64_t count, DType type, NcclComm* comm,
                       NcclStream* stream) override {
    return Add({FakeCall::kAllReduce, send, receive, count, type}, comm, stream);
  }
  NcclResult Broadcast(void* buffer, int64_t count, DType type, int root, NcclComm* comm,
                       NcclStream* stream) override {
    return Add({FakeCall::kBroadcast, buffer, buffer, count, type, root}, comm, stream);
  }
  NcclResult Send(const void* buffer, int64_t count, DType type, int peer, NcclComm* comm,
                  NcclStream* stream) override {
    return Add({FakeCall::kSend, buffer, nullptr, count, type, peer}, comm, stream);
  }
  NcclResult Receive(void* buffer, int64_t count, DType type, int peer, NcclComm* comm,
                     NcclStream* stream) override {
    return Add({FakeCall::kReceive, nullptr, buffer, count, type, peer}, comm, stream);
  }

  absl::StatusOr<NcclStream*> NewStream() override { return new NcclStream(); }
  void DeleteStream(NcclStream* stream) override { delete stream; }
  absl::StatusOr<bool> WaitFor(NcclStream* stream, const Event& event) override {
    if (std::dynamic_pointer_cast<FakeGpuEvent>(event.state()) == nullptr) return false;
    Push(stream, [event] { event.Wait().IgnoreError(); });
    return true;
  }
  absl::Status Copy(void* to, const void* from, size_t bytes, NcclStream* stream) override {
    Push(stream, [=] { std::memcpy(to, from, bytes); });
    return absl::OkStatus();
  }
  absl::Status Fold(const FoldArgs& args, NcclStream* stream) override {
    Push(stream, [args] {
      VisitFoldTypes(args, [&](auto in, auto out) {
        for (int64_t i = 0; i < args.count; ++i) FoldPack<decltype(in), decltype(out), 1>(args, i);
      });
    });
    return absl::OkStatus();
  }
  absl::StatusOr<NcclMark*> Mark(NcclStream* stream) override {
    auto* mark = new NcclMark();
    ++world_.live_marks_;
    Push(stream, [moment = mark->moment] {
      moment->at = std::chrono::steady_clock::now();
      moment->reached = true;
    });
    return mark;
  }
  absl::StatusOr<bool> Reached(NcclMark* mark) override { return mark->moment->reached.load(); }
  double Seconds(NcclMark* from, NcclMark* to) override {
    return std::chrono::duration<double>(to->moment->at - from->moment->at).count();
  }
  void FreeMark(NcclMark* mark) override {
    --world_.live_marks_;
    delete mark;
  }
  Event EventOf(std::shared_ptr<NcclOperation> operation) override { return Event(operation); }

 private:
  NcclResult Add(const FakeCall& call, NcclComm* comm, NcclStream* stream) {
    std::lock_guard lock(world_.mutex_);
    CheckReady(comm, "a collective");
    // A send alone may seem to be on the stream before it is.
    if (group_depth == 0) world_.Violation("a call outside of a group");
    world_.calls_[comm->rank].push_back(call.kind);
    group_comm = comm;
    group_stream = stream;
    group_calls.push_back(call);
    return NcclResult::kSuccess;
  }

  void Push(NcclStream* stream, std::function<void()> work) {
    if (stream->pending != nullptr) {
      std::lock_guard lock(world_.mutex_);
      world_.Violation("work on a stream before the group on it was there");
    }
    stream->Push(std::move(work));
  }

  void PutPending(NcclComm* comm) {
    NcclStream* const stream = std::exchange(comm->stream, nullptr);
    stream->pending = nullptr;
    const uint64_t launch = world_.launches_++;
    if (comm->gpu != FakeNccl::kOwnGpu) world_.on_gpu_[comm->gpu].push_back(launch);
    stream->Push([comm, launch, calls = std::exchange(comm->pending, {})] {
      comm->world->RunKernel(comm, calls, launch);
    });
  }

  void CheckAlive(NcclComm* comm, const char* what) {
    if (comm->over) world_.Violation(absl::StrCat(what, " on a communicator that is over"));
  }
  void CheckReady(NcclComm* comm, const char* what) {
    CheckAlive(comm, what);
    if (comm->stream != nullptr) {
      world_.Violation(absl::StrCat(what, " before the call before was ready"));
    }
  }

  FakeNccl& world_;
  const int gpu_;
};

FakeNccl::FakeNccl() = default;
FakeNccl::~FakeNccl() = default;

std::shared_ptr<NcclApi> FakeNccl::Api(int gpu) {
  std::lock_guard lock(mutex_);
  apis_.push_back(std::make_shared<FakeNcclApi>(this, gpu));
  return apis_.back();
}

void FakeNccl::Violation(const std::string& what) { violations_.push_back(what); }

void FakeNccl::SetError(int rank, NcclResult error) {
  std::lock_guard lock(mutex_);
  errors_[rank] = error;
}

void FakeNccl::HangAborts() {
  std::lock_guard lock(mutex_);
  hang_aborts_ = true;
}

void FakeNccl::RefuseRegistrations() {
  std::lock_guard lock(mutex_);
  refuses_registrations_ = true;
}

void FakeNccl::AwaitHungAbort() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return hung_ > 0; });
}

void FakeNccl::KeepKernels() {
  std::lock_guard lock(mutex_);
  keep_kernels_ = true;
}

void FakeNccl::Release() {
  std::lock_guard lock(mutex_);
  hang_aborts_ = keep_kernels_ = false;
  changed_.notify_all();
}

void FakeNccl::NoRoomForTwoKernels() {
  std::lock_guard lock(mutex_);
  no_room_for_two_ = true;
}

void FakeNccl::StallGroups() {
  std::lock_guard lock(mutex_);
  stall_groups_ = true;
}

void FakeNccl::AwaitAborts(int count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return aborted_ >= count; });
}

void FakeNccl::AwaitKernels(int count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return kernels_ >= count; });
}

std::vector<std::string> FakeNccl::violations() {
  std::lock_guard lock(mutex_);
  return violations_;
}
int FakeNccl::aborted() {
  std::lock_guard lock(mutex_);
  return aborted_;
}
int FakeNccl::destroyed() {
  std::lock_guard lock(mutex_);
  return destroyed_;
}
std::vector<FakeCall::Kind> FakeNccl::calls(int rank) {
  std::lock_guard lock(mutex_);
  return calls_[rank];
}

std::map<void*, size_t> FakeNccl::registered(int rank) {
  std::lock_guard lock(mutex_);
  std::map<void*, size_t> all;
  for (const auto& comm : comms_) {
    if (comm->rank == rank) all.insert(comm->registered.begin(), comm->registered.end());
  }
  return all;
}

int FakeNccl::groups(int rank) {
  std::lock_guard lock(mutex_);
  return groups_[rank];
}

bool FakeNccl::Stopped(const NcclComm& comm) const { return comm.stopped && !keep_kernels_; }

// The calls of one group: all of them at once, until all are done or the communicator is aborted.
void FakeNccl::RunKernel(NcclComm* comm, const std::vector<FakeCall>& calls, uint64_t launch) {
  std::unique_lock lock(mutex_);
  if (no_room_for_two_ && comm->gpu != kOwnGpu) {
    changed_.wait(lock, [&] { return Stopped(*comm) || on_gpu_[comm->gpu].front() == launch; });
  }
  ++kernels_;
  Clique& clique = cliques_[comm->id];
  std::vector<std::shared_ptr<Meeting>> meetings;
  std::vector<std::shared_ptr<Message>> messages;
  for (const FakeCall& call : calls) {
    if (call.kind == FakeCall::kSend || call.kind == FakeCall::kReceive) {
      const bool sends = call.kind == FakeCall::kSend;
      const auto way = sends ? std::pair(comm->rank, call.peer) : std::pair(call.peer, comm->rank);
      messages.push_back(std::make_shared<Message>(Message{call}));
      (sends ? clique.sends : clique.receives)[way].push_back(messages.back());
      Match(clique, way);
    } else {
      std::shared_ptr<Meeting>& meeting = clique.meetings[comm->next++];
      if (meeting == nullptr) meeting = std::make_shared<Meeting>();
      meeting->calls[comm->rank] = call;
      if (static_cast<int>(meeting->calls.size()) == clique.size) Execute(clique, *meeting);
      meetings.push_back(meeting);
    }
  }
  changed_.notify_all();
  changed_.wait(lock, [&] {
    if (Stopped(*comm)) return true;
    for (const auto& meeting : meetings) {
      if (!meeting->done) return false;
    }
    for (const auto& message : messages) {
      if (!message->done) return false;
    }
    return true;
  });
  if (comm->gpu != kOwnGpu) {
    std::erase(on_gpu_[comm->gpu], launch);
    changed_.notify_all();
  }
  // What is not done never will be, and this rank's memory is no longer touched.
  for (const auto& meeting : meetings) {
    if (!meeting->done) meeting->calls.erase(comm->rank);
  }
  for (auto* queues : {&clique.sends, &clique.receives}) {
    for (auto& [way, queue] : *queues) {
      for (const auto& message : messages) std::erase(queue, message);
    }
  }
}

void FakeNccl::Match(Clique& clique, std::pair<int, int> way) {
  auto& sends = clique.sends[way];
  auto& receives = clique.receives[way];
  while (!sends.empty() && !receives.empty()) {
    const FakeCall& from = sends.front()->call;
    const FakeCall& to = receives.front()->call;
    if (from.count != to.count || from.type != to.type) {
      Violation("a send and a receive of different sizes");
      return;
    }
    std::memcpy(to.receive, from.send, from.count * SizeOf(from.type));
    sends.front()->done = receives.front()->done = true;
    sends.pop_front();
    receives.pop_front();
  }
}

// Sums are made from the last rank to the first: not in the order that the communicator promises.
void FakeNccl::Execute(const Clique& clique, Meeting& meeting) {
  const FakeCall& first = meeting.calls.begin()->second;
  for (const auto& [rank, call] : meeting.calls) {
    if (call.kind != first.kind || call.count != first.count || call.type != first.type ||
        call.peer != first.peer) {
      Violation("ranks disagree about a collective");
      return;
    }
  }
  const auto bytes = static_cast<int64_t>(first.count * SizeOf(first.type));
  const bool gather = first.kind == FakeCall::kAllGather;
  const bool scatter = first.kind == FakeCall::kReduceScatter;
  const int64_t total = scatter ? clique.size * first.count : first.count;
  std::vector<float> sums(scatter || first.kind == FakeCall::kAllReduce ? total : 0);
  for (auto it = meeting.calls.rbegin(); it != meeting.calls.rend(); ++it) {
    for (size_t i = 0; i < sums.size(); ++i) {
      sums[i] += Value(it->second.send, first.type, static_cast<int64_t>(i));
    }
  }
  for (const auto& [rank, call] : meeting.calls) {
    if (gather) {
      for (const auto& [peer, from] : meeting.calls) {
        std::memmove(static_cast<char*>(call.receive) + peer * bytes, from.send, bytes);
      }
    } else if (first.kind == FakeCall::kBroadcast) {
      std::memmove(call.receive, meeting.calls.at(first.peer).send, bytes);
    } else {
      const int64_t start = scatter ? rank * first.count : 0;
      for (int64_t i = 0; i < first.count; ++i) {
        Store(sums[start + i], first.type, call.receive, i);
      }
    }
  }
  meeting.done = true;
}

}  // namespace zeroshard
