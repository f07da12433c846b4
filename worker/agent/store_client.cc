#include "worker/agent/store_client.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/crash_point.h"
#include "common/member/backoff.h"
#include "common/plan/zero_policy.h"
#include "common/spec/decision.h"
#include "common/status_macros.h"
#include "worker/agent/store_link.h"
#include "worker/agent/transfer.h"
#include "worker/device/host_stream.h"

namespace zeroshard {
namespace {

using Steady = std::chrono::steady_clock;

int64_t MostElements(const v1::OffloadSpec& spec) {
  const uint64_t count = std::max<uint64_t>(1, spec.buffer_count());
  const uint64_t size = std::max<uint64_t>(1, spec.buffer_size());
  const uint64_t most = uint64_t{1} << 62;
  return static_cast<int64_t>(size > most / count ? most : size * count);
}

absl::Status CheckMap(const v1::StoreMap& map, size_t chunks) {
  const size_t replicas = map.replicas();
  if (replicas == 0 || static_cast<size_t>(map.placement_size()) != chunks * replicas) {
    return absl::InvalidArgumentError(
        absl::StrCat("the map of the stores places ", map.placement_size(), " copies; ", chunks,
                     " chunks with ", replicas, " replicas each have ", chunks * replicas));
  }
  for (size_t c = 0; c < chunks; ++c) {
    bool held = false;
    for (size_t r = 0; r < replicas; ++r) {
      held |= map.placement(static_cast<int>(c * replicas + r)) <
              static_cast<uint32_t>(map.stores_size());
    }
    if (!held) {
      return absl::InvalidArgumentError(
          absl::StrCat("chunk ", c, " is on none of the map's ", map.stores_size(), " stores"));
    }
  }
  return absl::OkStatus();
}

// A part of a call, before it is started.
struct Piece {
  uint32_t chunk = 0;
  uint32_t begin = 0, count = 0;
  int64_t at = 0;  // elements from the call's begin
};

}  // namespace

absl::StatusOr<StoreClientOptions> StoreClientOptions::Of(const v1::Assign& assign,
                                                          const v1::Fence& fence) {
  const v1::JobSpec& spec = assign.spec();
  StoreClientOptions options;
  options.fence = fence;
  options.map = assign.stores();
  options.base = assign.version();
  ZS_ASSIGN_OR_RETURN(const ModelTable model, MakeModelTable(spec.model()));
  options.chunks = ChunkTable::Make(model);
  options.dtype = ComputeType(spec);
  const v1::ZeroSpec& zero = spec.zero_optimization();
  options.most_pushed = MostElements(zero.offload_optimizer());
  options.most_pulled =
      OffloadsParameters(spec) ? MostElements(zero.offload_param()) : options.most_pushed;
  options.open_timeout = absl::Seconds(spec.timeouts().start_seconds());
  options.stall_timeout = absl::Seconds(spec.timeouts().collective_seconds());
  options.load_timeout = std::max(options.open_timeout, options.stall_timeout);
  ZS_RETURN_IF_ERROR(CheckMap(options.map, options.chunks.chunks.size()));
  return options;
}

// Everything, shared with what gRPC still holds.
struct StoreClient::Core : std::enable_shared_from_this<StoreClient::Core> {
  explicit Core(StoreClientOptions o) : options(std::move(o)) {}

  // Waits for what it is told to start after.
  struct PullCall {
    uint64_t step = 0;
    char* out = nullptr;
    std::vector<Piece> pieces;
    std::shared_ptr<Transfer> transfer;
  };
  // Waits for room.
  struct PullPiece {
    uint64_t step = 0;
    Piece piece;
    char* out = nullptr;
    std::shared_ptr<Transfer> transfer;
  };

  absl::Status Open();
  void Start();
  void Join();
  // The first reason stays. Ends everything.
  void Fail(const absl::Status& reason);
  absl::Status Failure() const;

  absl::StatusOr<std::vector<Piece>> Split(const char* what, uint64_t step, int unit, int64_t begin,
                                           int64_t end) const;
  Event Push(uint64_t step, int unit, int64_t begin, int64_t end, const void* data,
             const Event& after);
  Event Pull(uint64_t step, int unit, int64_t begin, int64_t end, void* out, const Event& after);
  // `before`: of what it was told to start after.
  void StartPull(PullCall call, const absl::Status& before);

  void SendPushes();
  void SendPush(uint64_t step, const Piece& piece, const char* data,
                const std::shared_ptr<Transfer>& transfer);
  // One thread at a time sends what there is room for; a call meanwhile, also from within its own,
  // leaves that to it.
  void SendPulls();
  std::optional<PullPiece> NextPull();
  void SendPull(PullPiece next);
  absl::Duration Counted(Steady::time_point start) const {
    return absl::FromChrono(zeroshard::Counted(options.presence.get(), start));
  }
  void Watch();
  // Stores of the map that hold a chunk, without repetition.
  std::vector<uint32_t> Replicas(uint32_t chunk) const;

  const StoreClientOptions options;
  const std::shared_ptr<OffloadCounters> counters = std::make_shared<OffloadCounters>();
  Cancellation commits;
  std::vector<std::shared_ptr<StoreLink>> links;  // by store of the map; null: holds nothing

  struct PushCall {
    uint64_t step = 0;
    const char* data = nullptr;
    std::vector<Piece> pieces;
    Event after;
    std::shared_ptr<Transfer> transfer;
  };
  mutable std::mutex mutex;
  std::condition_variable changed;
  absl::Status failure;
  bool leaving = false;
  std::deque<PushCall> push_queue;  // the first is the sender's, until it is through with it
  std::deque<PullPiece> pull_queue;
  int64_t pushing = 0, pulling = 0;  // elements on their way
  bool sending_pulls = false;
  std::thread sender, watcher;
  std::map<uint64_t, PullCall> gated;  // pulls that wait for something of this rank
  uint64_t gated_calls = 0;
  std::unique_ptr<HostStream> gates;
};

// --- opening ---------------------------------------------------------------------------------

absl::Status StoreClient::Core::Open() {
  const std::weak_ptr<Core> weak = weak_from_this();
  std::vector<bool> used(static_cast<size_t>(options.map.stores_size()));
  for (const uint32_t store : options.map.placement()) {
    if (store < used.size()) used[store] = true;
  }
  links.resize(used.size());
  for (size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) continue;
    StoreLink::Options link;
    link.store = options.map.stores(static_cast<int>(i));
    link.hello.set_member(options.fence.member());
    link.hello.set_incarnation(options.fence.incarnation());
    link.hello.set_run_id(options.fence.run_id());
    link.hello.set_generation(options.fence.generation());
    link.hello.set_rank(options.fence.rank());
    link.epoch = options.base.epoch();
    link.dtype = options.dtype;
    link.counters = counters;
    link.shared_memory = options.shared_memory;
    link.on_fail = [weak](const absl::Status& status) {
      if (const auto core = weak.lock(); core != nullptr) core->Fail(status);
    };
    links[i] = StoreLink::Make(std::move(link));
  }
  Backoff backoff(absl::Milliseconds(20), absl::Seconds(1), RandomSeed());
  Cancellation never;
  Cancellation* cancellation = options.cancellation != nullptr ? options.cancellation : &never;
  const auto begun = Steady::now();
  while (true) {
    for (const auto& link : links) {
      if (link != nullptr) link->StartOpening();
    }
    absl::Status last;
    for (const auto& link : links) {
      if (link == nullptr) continue;
      std::optional<absl::Status> opened;
      while (!(opened = link->Opened(absl::Milliseconds(50))).has_value()) {
        ZS_RETURN_IF_ERROR(cancellation->status());
        if (Counted(begun) < options.open_timeout) continue;
        return absl::DeadlineExceededError(absl::StrCat(
            link->name(), " did not answer within ", absl::FormatDuration(options.open_timeout),
            "; look whether it runs and can be reached from this host"));
      }
      if (opened->ok()) continue;
      if (!absl::IsUnavailable(*opened)) return *opened;
      last = *opened;
    }
    ZS_RETURN_IF_ERROR(Failure());
    if (last.ok()) return absl::OkStatus();
    const absl::Duration pause = backoff.Next();
    if (Counted(begun) + pause >= options.open_timeout) {
      return absl::DeadlineExceededError(absl::StrCat(
          "not open within ", absl::FormatDuration(options.open_timeout), ": ", last.message()));
    }
    if (cancellation->Wait(pause)) return cancellation->status();
  }
}

void StoreClient::Core::Start() {
  gates = MakeHostStream("gated-pulls");
  sender = std::thread([this] { SendPushes(); });
  watcher = std::thread([this] { Watch(); });
}

void StoreClient::Core::Join() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    leaving = true;
    changed.notify_all();
  }
  gates = nullptr;
  if (sender.joinable()) sender.join();
  if (watcher.joinable()) watcher.join();
}

// --- the end ---------------------------------------------------------------------------------

absl::Status StoreClient::Core::Failure() const {
  std::lock_guard<std::mutex> lock(mutex);
  return failure;
}

void StoreClient::Core::Fail(const absl::Status& reason) {
  std::deque<PushCall> pushes;
  std::deque<PullPiece> pulls;
  std::map<uint64_t, PullCall> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!failure.ok()) return;
    failure = reason;
    pushes.swap(push_queue);
    pulls.swap(pull_queue);
    waiting.swap(gated);
    changed.notify_all();
  }
  commits.Cancel(reason);
  for (const PushCall& push : pushes) push.transfer->Fail(reason);
  for (const PullPiece& pull : pulls) pull.transfer->Fail(reason);
  for (const auto& [id, pull] : waiting) pull.transfer->Fail(reason);
  for (const auto& link : links) {
    if (link != nullptr) link->Close(reason);
  }
}

// --- calls -----------------------------------------------------------------------------------

absl::StatusOr<std::vector<Piece>> StoreClient::Core::Split(const char* what, uint64_t step,
                                                            int unit, int64_t begin,
                                                            int64_t end) const {
  const ChunkTable& table = options.chunks;
  const int units = static_cast<int>(table.first.size()) - 1;
  if (unit < 0 || unit >= units) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " of unit ", unit, "; the model has ", units));
  }
  const int first = table.first[static_cast<size_t>(unit)];
  const int last = table.first[static_cast<size_t>(unit) + 1];
  const int64_t length = last > first ? table.chunks[static_cast<size_t>(last) - 1].end : 0;
  if (begin < 0 || begin > end || end > length) {
    return absl::InvalidArgumentError(absl::StrCat(what, " of elements ", begin, " to ", end,
                                                   " of unit ", unit, ", which has ", length,
                                                   ", at step ", step));
  }
  std::vector<Piece> pieces;
  for (int c = first; c < last; ++c) {
    const Chunk& chunk = table.chunks[static_cast<size_t>(c)];
    const int64_t from = std::max(begin, chunk.begin);
    const int64_t to = std::min(end, chunk.end);
    if (from >= to) continue;
    pieces.push_back({static_cast<uint32_t>(c), static_cast<uint32_t>(from - chunk.begin),
                      static_cast<uint32_t>(to - from), from - begin});
  }
  return pieces;
}

Event StoreClient::Core::Push(uint64_t step, int unit, int64_t begin, int64_t end, const void* data,
                              const Event& after) {
  auto pieces = Split("a push", step, unit, begin, end);
  if (pieces.ok() && pieces->empty()) return after;
  auto transfer = std::make_shared<Transfer>(end - begin);
  const Event event = transfer->event();
  if (!pieces.ok()) {
    transfer->Fail(pieces.status());
    return event;
  }
  PushCall call{step, static_cast<const char*>(data), *std::move(pieces), after, transfer};
  std::unique_lock<std::mutex> lock(mutex);
  if (!failure.ok()) {
    const absl::Status reason = failure;
    lock.unlock();
    transfer->Fail(reason);
    return event;
  }
  push_queue.push_back(std::move(call));
  changed.notify_all();
  lock.unlock();
  return event;
}

Event StoreClient::Core::Pull(uint64_t step, int unit, int64_t begin, int64_t end, void* out,
                              const Event& after) {
  auto pieces = Split("a pull", step, unit, begin, end);
  if (pieces.ok() && pieces->empty()) return after;
  auto transfer = std::make_shared<Transfer>(end - begin);
  const Event event = transfer->event();
  if (!pieces.ok()) {
    transfer->Fail(pieces.status());
    return event;
  }
  PullCall call{step, static_cast<char*>(out), *std::move(pieces), std::move(transfer)};
  if (after.Done()) {
    StartPull(std::move(call), after.Wait());
    return event;
  }
  std::unique_lock<std::mutex> lock(mutex);
  if (!failure.ok()) {
    call.transfer->Fail(failure);
    return event;
  }
  const uint64_t id = gated_calls++;
  gated.emplace(id, std::move(call));
  lock.unlock();
  gates->Enqueue([this, id, after] {
    const absl::Status before = after.Wait();
    std::unique_lock<std::mutex> lock(mutex);
    auto node = gated.extract(id);
    lock.unlock();
    if (!node.empty()) StartPull(std::move(node.mapped()), before);
    return absl::OkStatus();
  });
  return event;
}

void StoreClient::Core::StartPull(PullCall call, const absl::Status& before) {
  absl::Status reason = before;
  if (reason.ok()) {
    std::lock_guard<std::mutex> lock(mutex);
    reason = failure;
    if (reason.ok()) {
      for (const Piece& piece : call.pieces) {
        pull_queue.push_back(
            {call.step, piece, call.out + piece.at * SizeOf(options.dtype), call.transfer});
      }
    }
  }
  if (reason.ok()) {
    SendPulls();
  } else {
    call.transfer->Fail(reason);
  }
}

std::vector<uint32_t> StoreClient::Core::Replicas(uint32_t chunk) const {
  std::vector<uint32_t> stores;
  for (uint32_t r = 0; r < options.map.replicas(); ++r) {
    const uint32_t store =
        options.map.placement(static_cast<int>(chunk * options.map.replicas() + r));
    if (store < links.size() && std::find(stores.begin(), stores.end(), store) == stores.end()) {
      stores.push_back(store);
    }
  }
  return stores;
}

// --- on their way ----------------------------------------------------------------------------

// On the sender's thread: in the order of the calls, each after its event and when there is room.
void StoreClient::Core::SendPushes() {
  while (true) {
    Event after;
    {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [this] { return leaving || !push_queue.empty(); });
      if (leaving) return;
      after = push_queue.front().after;
    }
    // The call stays in the queue, where Fail finds it: it need not wait for `after`.
    const absl::Status before = after.Wait();
    PushCall call;
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (push_queue.empty()) continue;
      call = std::move(push_queue.front());
      push_queue.pop_front();
    }
    if (!before.ok()) {
      call.transfer->Fail(before);
      continue;
    }
    for (const Piece& piece : call.pieces) {
      absl::Status reason;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] {
          return leaving || !failure.ok() || pushing == 0 ||
                 pushing + piece.count <= options.most_pushed;
        });
        if (leaving && failure.ok()) return;
        reason = failure;
        if (reason.ok()) pushing += piece.count;
      }
      if (!reason.ok()) {
        call.transfer->Fail(reason);
        break;
      }
      SendPush(call.step, piece, call.data, call.transfer);
    }
  }
}

void StoreClient::Core::SendPush(uint64_t step, const Piece& piece, const char* data,
                                 const std::shared_ptr<Transfer>& transfer) {
  CrashPoint("worker.before_push", step, options.fence.rank());
  auto on_gone = [core = shared_from_this()](int64_t count) {
    std::lock_guard<std::mutex> lock(core->mutex);
    core->pushing -= count;
    core->changed.notify_all();
  };
  auto sent = std::make_shared<TransferPiece>(transfer, std::move(on_gone));
  sent->step = step;
  sent->chunk = piece.chunk;
  sent->begin = piece.begin;
  sent->count = piece.count;
  sent->from = data + piece.at * SizeOf(options.dtype);
  const std::vector<uint32_t> stores = Replicas(piece.chunk);
  const size_t frames = FramesOf(piece.count, options.dtype);
  sent->unacknowledged = frames * stores.size();
  StoreLink::Checksums checksums;
  if (stores.size() > 1) {
    for (size_t i = 0; i < frames; ++i) {
      checksums.push_back(std::make_shared<std::atomic<uint64_t>>(0));
    }
  }
  for (const uint32_t store : stores) links[store]->Push(sent, checksums);
}

std::optional<StoreClient::Core::PullPiece> StoreClient::Core::NextPull() {
  std::lock_guard<std::mutex> lock(mutex);
  const bool room =
      !pull_queue.empty() &&
      (pulling == 0 || pulling + pull_queue.front().piece.count <= options.most_pulled);
  if (!room) {
    sending_pulls = false;
    return std::nullopt;
  }
  PullPiece next = std::move(pull_queue.front());
  pull_queue.pop_front();
  pulling += next.piece.count;
  return next;
}

void StoreClient::Core::SendPulls() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (std::exchange(sending_pulls, true)) return;
  }
  while (std::optional<PullPiece> next = NextPull()) SendPull(*std::move(next));
}

void StoreClient::Core::SendPull(PullPiece next) {
  auto on_gone = [core = shared_from_this()](int64_t count) {
    {
      std::lock_guard<std::mutex> lock(core->mutex);
      core->pulling -= count;
    }
    core->SendPulls();
  };
  auto sent = std::make_shared<TransferPiece>(std::move(next.transfer), std::move(on_gone));
  sent->step = next.step;
  sent->chunk = next.piece.chunk;
  sent->begin = next.piece.begin;
  sent->count = next.piece.count;
  sent->to = next.out;
  const std::vector<uint32_t> stores = Replicas(next.piece.chunk);
  const size_t replica = (options.fence.rank() + next.piece.chunk) % stores.size();
  links[stores[replica]]->Pull(std::move(sent));
}

void StoreClient::Core::Watch() {
  const absl::Duration tick =
      std::clamp(options.stall_timeout / 8, absl::Milliseconds(5), absl::Seconds(1));
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait_for(lock, absl::ToChronoNanoseconds(tick),
                       [this] { return leaving || !failure.ok(); });
      if (leaving || !failure.ok()) return;
    }
    for (const auto& link : links) {
      if (link == nullptr) continue;
      const auto oldest = link->Oldest();
      if (!oldest.has_value()) continue;
      const bool loading = oldest->pull && oldest->step == options.base.step();
      const absl::Duration waited = Counted(oldest->moved);
      if (waited < (loading ? options.load_timeout : options.stall_timeout)) continue;
      Fail(absl::DeadlineExceededError(absl::StrCat(
          link->name(), ": nothing moved for ", absl::FormatDuration(waited), " while ",
          oldest->pull ? "parameters" : "gradients", " of step ", oldest->step, ", chunk ",
          oldest->chunk, oldest->pull ? " were waited for" : " waited to be acknowledged")));
      break;
    }
  }
}

// --- the interface ---------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<StoreClient>> StoreClient::Open(StoreClientOptions options) {
  ZS_RETURN_IF_ERROR(CheckMap(options.map, options.chunks.chunks.size()));
  auto core = std::make_shared<Core>(std::move(options));
  std::unique_ptr<StoreClient> client(new StoreClient(core));
  ZS_RETURN_IF_ERROR(core->Open());
  core->Start();
  return client;
}

StoreClient::StoreClient(std::shared_ptr<Core> core) : core_(std::move(core)) {}

StoreClient::~StoreClient() {
  core_->Fail(absl::AbortedError("the run is over"));
  core_->Join();
}

v1::StateVersion StoreClient::base() const { return core_->options.base; }

Event StoreClient::Push(uint64_t step, int unit, int64_t begin, int64_t end, const void* data,
                        const Event& after) {
  return core_->Push(step, unit, begin, end, data, after);
}

Event StoreClient::Pull(uint64_t step, int unit, int64_t begin, int64_t end, void* out,
                        const Event& after) {
  return core_->Pull(step, unit, begin, end, out, after);
}

absl::StatusOr<v1::StepDecision> StoreClient::Commit(const v1::StepRecord& record,
                                                     uint64_t next_sample, uint64_t samples) {
  v1::CommitStepRequest request;
  *request.mutable_fence() = core_->options.fence;
  *request.mutable_record() = record;
  request.set_epoch(core_->options.base.epoch());
  request.set_next_sample(next_sample);
  request.set_samples(samples);
  return core_->options.client->CommitStep(request, absl::InfiniteDuration(), &core_->commits);
}

void StoreClient::Abort(const std::string& reason) { core_->Fail(absl::AbortedError(reason)); }

const OffloadCounters& StoreClient::counters() const { return *core_->counters; }

}  // namespace zeroshard
