#include "shard_store/state/load_state.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/checkpoint/reader.h"
#include "common/hf/weights.h"
#include "common/kernels/init.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace zeroshard::store {
namespace {

constexpr StateKind kKinds[] = {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq};

// Where values come from; what reads from what.
struct OpenSources {
  std::unique_ptr<CheckpointReader> reader;
  std::unique_ptr<ParameterSource> sources[kStateKinds];

  JobState::Sources Get() const { return {sources[0].get(), sources[1].get(), sources[2].get()}; }
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
  ZS_ASSIGN_OR_RETURN(const OpenSources open, OpenAll(request, model));
  // Either of the two that fails ends the other.
  std::atomic<bool> stop = false;
  const auto moved = [&hooks, &stop] {
    if (*hooks.stop) stop = true;
    hooks.progress();
  };
  std::future<absl::Status> verified;
  if (open.reader != nullptr) {
    verified = std::async(std::launch::async, [&] {
      absl::Status status = open.reader->VerifyFiles(
          0, 1, [&moved](uint64_t) { moved(); }, &stop);
      if (!status.ok()) stop = true;
      return status;
    });
  }
  const absl::Status filled = state->Fill(
      open.Get(), chunks, [&moved](uint32_t) { moved(); }, &stop);
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

// The chunks that one store is to be asked for.
class PeerCopy {
 public:
  PeerCopy(const LoadRequest& request, uint32_t store, const LoadHooks& hooks, JobState* state)
      : job_(request.job), store_(store), hooks_(hooks), state_(state) {}

  absl::Status Copy(const std::map<uint32_t, Chunk>& chunks) {
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
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Read(uint32_t chunk, StateKind kind, int64_t begin, absl::Span<float> values) {
    const absl::Time start = absl::Now();
    while (true) {
      if (*hooks_.stop) return absl::CancelledError("stopped while copying");
      absl::Status status;
      if (reader_ == nullptr) {
        absl::StatusOr<std::unique_ptr<PeerReader>> connected = hooks_.connect(store_);
        status = connected.status();
        if (connected.ok()) reader_ = *std::move(connected);
      }
      if (status.ok()) status = reader_->Read(job_.copy(), chunk, kind, begin, values);
      if (status.ok()) {
        hooks_.progress();
        return status;
      }
      reader_ = nullptr;
      if (!MayPass(status) || absl::Now() - start > hooks_.peer_timeout)
        return Named(status, chunk);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }

  absl::Status Named(const absl::Status& status, uint32_t chunk) const {
    std::string name = absl::StrCat("store ", store_);
    if (store_ < static_cast<uint32_t>(job_.map().stores_size())) {
      const v1::StoreMap::Store& peer = job_.map().stores(static_cast<int>(store_));
      name = absl::StrCat(peer.member(), " at ", peer.address());
    }
    return absl::Status(status.code(),
                        absl::StrCat("cannot copy chunk ", chunk, " at step ", job_.copy().step(),
                                     " from ", name, ": ", status.message()));
  }

  const v1::StoreJob& job_;
  const uint32_t store_;
  const LoadHooks& hooks_;
  JobState* const state_;
  std::unique_ptr<PeerReader> reader_;
};

// One thread a store, as they answer one after the other.
absl::Status CopyFromPeers(const LoadRequest& request,
                           const std::map<uint32_t, std::map<uint32_t, Chunk>>& by_store,
                           const LoadHooks& hooks, JobState* state) {
  std::atomic<bool> stop = false;
  LoadHooks own = hooks;
  own.stop = &stop;
  own.progress = [&hooks, &stop] {
    if (*hooks.stop) stop = true;
    hooks.progress();
  };
  std::vector<std::future<absl::Status>> copies;
  for (const auto& [store, chunks] : by_store) {
    copies.push_back(std::async(std::launch::async, [&, store = store, &chunks = chunks] {
      absl::Status status = PeerCopy(request, store, own, state).Copy(chunks);
      if (!status.ok()) stop = true;
      return status;
    }));
  }
  absl::Status first;
  for (std::future<absl::Status>& copy : copies) {
    // A peer that says nothing moves nothing: what stops the load is passed on here.
    while (copy.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready)
      if (*hooks.stop) stop = true;
    absl::Status status = copy.get();
    if (first.ok() || (absl::IsCancelled(first) && !status.ok())) first = std::move(status);
  }
  return first;
}

}  // namespace

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
  return CopyFromPeers(request, by_store, hooks, state);
}

}  // namespace zeroshard::store
