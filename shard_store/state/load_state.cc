#include "shard_store/state/load_state.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "common/checkpoint/reader.h"
#include "common/hf/weights.h"
#include "common/kernels/init.h"
#include "common/log.h"
#include "common/spec/timeouts.h"
#include "common/status_macros.h"

namespace zeroshard::store {
namespace {

using Steady = std::chrono::steady_clock;

constexpr StateKind kKinds[] = {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq};

// Says how far a load is. Thread-safe.
class Doing {
 public:
  Doing(const LoadHooks& hooks, std::string what, size_t all)
      : hooks_(hooks), what_(std::move(what)), all_(all) {
    Say();
  }
  void OneMore() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++done_;
    }
    Say();
  }
  void Waits(const std::string& for_what) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (std::exchange(waits_, for_what) == for_what) return;
    }
    Say();
  }

 private:
  void Say() {
    if (!hooks_.doing) return;
    std::string text;
    bool waits = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waits = !waits_.empty();
      text = absl::StrCat(what_, ": ", done_, " of ", all_, all_ == 1 ? " chunk is" : " chunks are",
                          " here", waits ? "; " : "", waits_);
    }
    hooks_.doing(text, waits);
  }

  const LoadHooks& hooks_;
  const std::string what_;
  const size_t all_;
  std::mutex mutex_;
  size_t done_ = 0;
  std::string waits_;
};

// While it lives the folder is being read.
class Reading {
 public:
  Reading(const LoadHooks& hooks, const std::string& folder) : hooks_(hooks), folder_(folder) {
    Say(true);
  }
  ~Reading() { Say(false); }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  void Say(bool begins) const {
    if (hooks_.reading && !folder_.empty()) hooks_.reading(folder_, begins);
  }
  const LoadHooks& hooks_;
  const std::string& folder_;
};

// A source of which it is told when it is being read.
class ToldSource : public ParameterSource {
 public:
  ToldSource(const LoadHooks& hooks, const std::string& folder, const ParameterSource& source)
      : hooks_(hooks), folder_(folder), source_(source) {}
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override {
    const Reading reading(hooks_, folder_);
    return source_.Read(tensor, begin, end, out);
  }
  void DropPages() const override { source_.DropPages(); }

 private:
  const LoadHooks& hooks_;
  const std::string& folder_;
  const ParameterSource& source_;
};

// Where values come from; what reads from what.
struct OpenSources {
  std::unique_ptr<CheckpointReader> reader;
  std::unique_ptr<ParameterSource> sources[kStateKinds], told[kStateKinds];

  JobState::Sources Get() const { return {told[0].get(), told[1].get(), told[2].get()}; }
};

absl::StatusOr<OpenSources> OpenAll(const LoadRequest& request, const ModelTable& model) {
  const v1::StoreJob& job = request.job;
  OpenSources open;
  if (job.checkpoint().empty()) {
    const std::string& folder = job.spec().model().init_from();
    if (folder.empty()) {
      open.sources[0] = std::make_unique<FreshWeights>(job.spec().seed());
      return open;
    }
    std::vector<std::string> warnings;
    ZS_ASSIGN_OR_RETURN(open.sources[0], HfWeights::Open(folder, model, &warnings));
    for (const std::string& warning : warnings) LogWarning(warning);
    return open;
  }
  ZS_ASSIGN_OR_RETURN(open.reader, CheckpointReader::Open(job.checkpoint()));
  ZS_RETURN_IF_ERROR(open.reader->CheckModel(model, !job.weights_only()));
  open.sources[0] = open.reader->Source(StateKind::kMaster);
  if (job.weights_only()) return open;
  if (open.reader->manifest().step != job.base().step()) {
    return absl::InvalidArgumentError(
        absl::StrCat("asked to load the state of step ", job.base().step(), ", but ",
                     job.checkpoint(), " holds that of step ", open.reader->manifest().step));
  }
  open.sources[1] = open.reader->Source(StateKind::kExpAvg);
  if (!request.momentum_only) open.sources[2] = open.reader->Source(StateKind::kExpAvgSq);
  return open;
}

absl::Status FillFromSources(const LoadRequest& request, const std::vector<uint32_t>& chunks,
                             const ModelTable& model, const LoadHooks& hooks, JobState* state) {
  if (chunks.empty()) return absl::OkStatus();
  const std::string& from = request.job.checkpoint().empty()
                                ? request.job.spec().model().init_from()
                                : request.job.checkpoint();
  auto opening = std::make_optional<Reading>(hooks, from);
  Doing doing(
      hooks,
      absl::StrCat("is loading its chunks", from.empty() ? "" : absl::StrCat(" from ", from)),
      chunks.size());
  ZS_ASSIGN_OR_RETURN(OpenSources open, OpenAll(request, model));
  for (int kind = 0; kind < kStateKinds; ++kind) {
    if (open.sources[kind] == nullptr) continue;
    open.told[kind] = std::make_unique<ToldSource>(hooks, from, *open.sources[kind]);
  }
  opening.reset();
  // Either of the two that fails ends the other.
  std::atomic<bool> stop = false;
  const auto moved = [&hooks, &stop] {
    if (*hooks.stop) stop = true;
    hooks.progress();
  };
  std::future<absl::Status> verified;
  if (open.reader != nullptr) {
    verified = std::async(std::launch::async, [&] {
      const Reading reading(hooks, from);
      absl::Status status = open.reader->VerifyFiles(
          0, 1, [&moved](uint64_t) { moved(); }, &stop);
      if (!status.ok()) stop = true;
      return status;
    });
  }
  const absl::Status filled = state->Fill(
      open.Get(), chunks,
      [&](uint32_t) {
        doing.OneMore();
        moved();
      },
      &stop);
  if (!filled.ok()) stop = true;
  const absl::Status sound = verified.valid() ? verified.get() : absl::OkStatus();
  if (!sound.ok() && !absl::IsCancelled(sound)) return sound;
  ZS_RETURN_IF_ERROR(filled);
  return sound;
}

bool MayPass(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsAborted(status) ||
         absl::IsFailedPrecondition(status) || absl::IsDeadlineExceeded(status);
}

std::string NameOfStore(const v1::StoreJob& job, uint32_t store) {
  if (store >= static_cast<uint32_t>(job.map().stores_size())) return absl::StrCat("store ", store);
  const v1::StoreMap::Store& peer = job.map().stores(static_cast<int>(store));
  return absl::StrCat(peer.member(), " at ", peer.address());
}

// The chunks that one store is to be asked for. Copy is called by one thread, Watch by another.
class PeerCopy {
 public:
  PeerCopy(const LoadRequest& request, uint32_t store, const LoadHooks& hooks, JobState* state)
      : job_(request.job),
        store_(store),
        name_(NameOfStore(request.job, store)),
        hooks_(hooks),
        state_(state) {}

  absl::Status Copy(const std::map<uint32_t, Chunk>& chunks,
                    const std::function<void(uint32_t)>& on_chunk) {
    std::vector<float> values;
    for (const auto& [id, chunk] : chunks) {
      for (const StateKind kind : kKinds) {
        if (!state_->HasKind(id, kind)) continue;
        constexpr int64_t kPiece = static_cast<int64_t>(bulk::kMaxPayload / sizeof(float));
        for (int64_t at = 0; at < chunk.size(); at += kPiece) {
          values.resize(static_cast<size_t>(std::min(kPiece, chunk.size() - at)));
          ZS_RETURN_IF_ERROR(Read(id, kind, at, absl::MakeSpan(values)));
          ZS_RETURN_IF_ERROR(state_->SetState(id, kind, at, values));
        }
      }
      ZS_RETURN_IF_ERROR(state_->FinishChunk(id));
      on_chunk(id);
    }
    return absl::OkStatus();
  }

  // Interrupts a copy that is to stop, or whose store has given nothing for too long. Returns what
  // has been waited for so far, in words, where that is worth a word.
  std::string Watch(bool stop) {
    std::shared_ptr<PeerReader> reader;
    std::string text;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const absl::Duration silent = absl::FromChrono(Steady::now() - heard_);
      if (reading_ && silent >= kWorthAWord) {
        text = absl::StrCat("waits for ", name_, " since ",
                            absl::FormatDuration(absl::Trunc(silent, absl::Seconds(1))),
                            last_.ok() ? "" : absl::StrCat(" (", last_.message(), ")"));
      }
      if (!stop && (!reading_ || silent < hooks_.peer_timeout)) return text;
      (stop ? stopped_ : late_) = true;
      reader = reader_;
    }
    if (reader != nullptr) reader->Cancel();
    return text;
  }

 private:
  absl::Status Read(uint32_t chunk, StateKind kind, int64_t begin, absl::Span<float> values) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      reading_ = true;
      heard_ = Steady::now();
      last_ = absl::OkStatus();
    }
    while (true) {
      const absl::StatusOr<std::shared_ptr<PeerReader>> reader = Connected();
      absl::Status status = reader.status();
      if (status.ok()) status = (*reader)->Read(job_.copy(), chunk, kind, begin, values);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (status.ok()) {
          reading_ = false;
        } else {
          reader_ = nullptr;
          if (stopped_) return absl::CancelledError("stopped while copying");
          if (late_) return Late(chunk);
          last_ = status;
        }
      }
      if (status.ok()) {
        hooks_.progress();
        return status;
      }
      if (!MayPass(status)) return Named(status, chunk);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }

  // The reader that there is, or a new one.
  absl::StatusOr<std::shared_ptr<PeerReader>> Connected() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stopped_ || late_) return absl::CancelledError("stopped while copying");
      if (reader_ != nullptr) return reader_;
    }
    ZS_ASSIGN_OR_RETURN(std::shared_ptr<PeerReader> reader, hooks_.connect(store_));
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_ || late_) return absl::CancelledError("stopped while copying");
    reader_ = reader;
    return reader;
  }

  absl::Status Late(uint32_t chunk) const {
    const std::string text =
        absl::StrCat("nothing came for ", absl::FormatDuration(hooks_.peer_timeout),
                     last_.ok() ? "" : ": ", last_.message());
    const absl::StatusCode code = last_.ok() ? absl::StatusCode::kUnavailable : last_.code();
    return Named(absl::Status(code, text), chunk);
  }

  absl::Status Named(const absl::Status& status, uint32_t chunk) const {
    return absl::Status(status.code(),
                        absl::StrCat("cannot copy chunk ", chunk, " at step ", job_.copy().step(),
                                     " from ", name_, ": ", status.message()));
  }

  static constexpr absl::Duration kWorthAWord = absl::Seconds(1);

  const v1::StoreJob& job_;
  const uint32_t store_;
  const std::string name_;
  const LoadHooks& hooks_;
  JobState* const state_;

  std::mutex mutex_;
  std::shared_ptr<PeerReader> reader_;
  bool reading_ = false;
  Steady::time_point heard_ = Steady::now();  // when the read under way began
  absl::Status last_;                         // of its tries
  bool stopped_ = false, late_ = false;
};

// One thread a store, as they answer one after the other.
absl::Status CopyFromPeers(const LoadRequest& request,
                           const std::map<uint32_t, std::map<uint32_t, Chunk>>& by_store,
                           const LoadHooks& hooks, Doing* doing, JobState* state) {
  std::vector<std::unique_ptr<PeerCopy>> peers;
  std::vector<std::future<absl::Status>> copies;
  std::vector<std::thread> threads;
  peers.reserve(by_store.size());
  copies.reserve(by_store.size());
  threads.reserve(by_store.size());
  // Nothing throws once a thread runs: those that do are waited for.
  absl::Status first = Caught([&]() -> absl::Status {
    for (const auto& [store, chunks] : by_store) {
      auto peer = std::make_unique<PeerCopy>(request, store, hooks, state);
      auto copy = std::make_shared<std::packaged_task<absl::Status()>>([peer = peer.get(),
                                                                        &chunks = chunks, doing] {
        return Caught([&] { return peer->Copy(chunks, [doing](uint32_t) { doing->OneMore(); }); });
      });
      std::future<absl::Status> copied = copy->get_future();
      std::thread thread;
      ZS_RETURN_IF_ERROR(StartThread(
          hooks.start_thread, [copy] { (*copy)(); }, &thread));
      threads.push_back(std::move(thread));
      peers.push_back(std::move(peer));
      copies.push_back(std::move(copied));
    }
    return absl::OkStatus();
  });
  // Whatever ends the load, or one of the copies, ends what waits for the other stores too.
  bool stop = !first.ok();
  std::vector<bool> over(copies.size(), false);
  while (std::find(over.begin(), over.end(), false) != over.end()) {
    std::string waits;
    stop |= *hooks.stop;
    for (size_t i = 0; i < copies.size(); ++i) {
      if (over[i]) continue;
      const std::string text = peers[i]->Watch(stop);
      if (!text.empty()) absl::StrAppend(&waits, waits.empty() ? "" : ", ", text);
      if (copies[i].wait_for(std::chrono::milliseconds(10)) != std::future_status::ready) continue;
      over[i] = true;
      absl::Status status = copies[i].get();
      stop |= !status.ok();
      if (first.ok() || (absl::IsCancelled(first) && !status.ok())) first = std::move(status);
    }
    doing->Waits(waits);
  }
  for (std::thread& thread : threads) thread.join();
  return first;
}

}  // namespace

absl::Duration PeerTimeout(const v1::JobSpec& spec) {
  return std::min(std::min(StartTimeout(spec), StepTimeout(spec)) / 4, absl::Seconds(30));
}

absl::Status LoadState(const LoadRequest& request, const ModelTable& model, const LoadHooks& hooks,
                       JobState* state) {
  std::map<uint32_t, std::map<uint32_t, Chunk>> by_store;
  std::set<uint32_t> copied;
  for (const v1::StoreJob::Copy& copy : request.job.copies()) {
    const auto found = request.chunks.find(copy.chunk());
    if (found == request.chunks.end() || !copied.insert(copy.chunk()).second) continue;
    by_store[copy.from_store()].insert(*found);
  }
  std::vector<uint32_t> filled;
  for (const auto& [id, chunk] : request.chunks)
    if (!copied.contains(id)) filled.push_back(id);
  ZS_RETURN_IF_ERROR(FillFromSources(request, filled, model, hooks, state));
  if (by_store.empty()) return absl::OkStatus();
  std::vector<std::string> from;
  for (const auto& [store, chunks] : by_store) from.push_back(NameOfStore(request.job, store));
  Doing doing(hooks, absl::StrCat("is copying chunks from ", absl::StrJoin(from, ", ")),
              copied.size());
  return CopyFromPeers(request, by_store, hooks, &doing, state);
}

}  // namespace zeroshard::store
