#include "shard_store/core/job_control.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace zeroshard::store {
namespace {

// No maps in it: equal messages have equal bytes.
bool Same(const v1::StepDecision& a, const v1::StepDecision& b) {
  return a.SerializeAsString() == b.SerializeAsString();
}

// A generation's, at most: whoever makes ranks up is refused before they fill memory.
constexpr size_t kMostRanks = size_t{1} << 16;

// What a peer says of itself may be anything.
std::string Named(absl::string_view text) {
  return text.empty() ? "(none)" : absl::CHexEscape(text.substr(0, 80));
}

bool SameChunks(const std::map<uint32_t, Chunk>& a, const std::map<uint32_t, Chunk>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(),
                                            [](auto& x, auto& y) { return x.first == y.first; });
}

}  // namespace

JobControl::JobControl(std::string run_id, int64_t chunk_elements)
    : chunk_elements_(chunk_elements) {
  report_.set_run_id(std::move(run_id));
}

bool JobControl::Held() const { return report_.phase() != v1::STORE_PHASE_UNSPECIFIED; }

absl::StatusOr<Orders> JobControl::OnDirective(const v1::StoreDirective& directive,
                                               absl::string_view self) {
  if (directive.run_id() != report_.run_id()) {
    return absl::InvalidArgumentError(absl::StrCat("a directive for ", directive.run_id(),
                                                   " came to what is here of ", report_.run_id()));
  }
  ZS_RETURN_IF_ERROR(CheckCounters(directive));
  ZS_RETURN_IF_ERROR(CheckSelf(directive, self));
  Orders orders;
  if (directive.drop()) {
    report_.set_term(directive.term());
    if (report_.dropped()) return orders;
    const bool snapshot_runs = snapshot_ && snapshot_started_ && !report_.snapshot().done();
    v1::StoreReport last;
    last.set_run_id(report_.run_id());
    last.set_term(report_.term());
    last.set_generation(std::max(report_.generation(), directive.generation()));
    last.set_dropped(true);
    report_ = std::move(last);
    job_.Clear();
    placed_.clear();
    ranks_.clear();
    chunks_.clear();
    valid_.clear();
    staging_.clear();
    digests_.clear();
    applied_.clear();
    applying_.reset();
    waiting_.reset();
    snapshot_.reset();
    orders.end_streams = true;
    orders.forget = true;
    orders.cancel_snapshot = snapshot_runs;
    return orders;
  }
  std::optional<Map> map;
  if (NeedsMap(directive)) {
    ZS_ASSIGN_OR_RETURN(map, ReadMap(directive));
  }
  ZS_RETURN_IF_ERROR(CheckContents(directive, map));
  report_.set_term(directive.term());
  Follow(directive, map, &orders);
  return orders;
}

void JobControl::Follow(const v1::StoreDirective& directive, const std::optional<Map>& map,
                        Orders* orders) {
  waiting_.reset();
  if (map && !TakeMap(directive, *map, orders)) {
    if (applying_) waiting_ = Waiting{directive, map};
    return;
  }
  if (report_.phase() == v1::STORE_PHASE_FAILED) return;
  TakeSnapshot(directive, orders);
  digest_wanted_ = directive.digest_step();
  StartWhatWaits(orders);
  if (directive.has_decision()) TakeDecision(directive.decision(), orders);
  if (report_.phase() == v1::STORE_PHASE_FAILED) {
    orders->load = false;
    orders->keep.clear();
    orders->digest_step.reset();
    return;
  }
  if (orders->apply) orders->digest_step.reset();
  if (directive.generation() > report_.generation()) {
    report_.set_generation(directive.generation());
    ranks_.clear();
    orders->end_streams = true;
    ClearStaging();
    // What is being applied uses it; that frees it.
    if (!applying_) orders->drop_staging = true;
  }
  MaybeSeal();
}

bool JobControl::TakeMap(const v1::StoreDirective& directive, const Map& map, Orders* orders) {
  const bool copies = !map.copied.empty();
  if (!Held() || directive.epoch() != epoch() || report_.phase() == v1::STORE_PHASE_FAILED) {
    BeginLoad(directive, map, {}, copies ? map.job.copy().step() : map.job.base().step(), orders);
    return true;
  }
  const bool whole = report_.phase() != v1::STORE_PHASE_LOADING;
  if (whole && SameChunks(map.chunks, chunks_) && !digest_started_) {
    job_ = map.job;
    placed_ = map.placed;
    report_.set_map_version(map.version);
    report_.clear_digest_step();
    report_.clear_digest_low();
    report_.clear_digest_high();
    return true;
  }
  // The chunks that stay must be whole before others join them.
  if (directive.has_decision() && report_.phase() == v1::STORE_PHASE_READY &&
      directive.decision().step() > report_.version().step()) {
    TakeDecision(directive.decision(), orders);
  }
  if (applying_ || report_.phase() == v1::STORE_PHASE_FAILED) return false;
  const uint64_t here = report_.version().step();
  const uint64_t step = copies ? map.job.copy().step() : here;
  BeginLoad(directive, map, step == here ? valid_ : std::set<uint32_t>(), step, orders);
  return true;
}

void JobControl::BeginLoad(const v1::StoreDirective& directive, const Map& map,
                           std::set<uint32_t> keep, uint64_t step, Orders* orders) {
  orders->load = true;
  orders->drop_staging = true;
  if (snapshot_ && snapshot_started_ && !report_.snapshot().done()) orders->cancel_snapshot = true;
  snapshot_.reset();
  digest_started_ = false;
  applying_.reset();
  applied_.clear();
  digests_.clear();

  v1::StoreReport next;
  next.set_run_id(report_.run_id());
  next.set_term(report_.term());
  next.set_generation(report_.generation());
  next.set_progress(report_.progress());
  next.set_map_version(map.version);
  next.set_phase(v1::STORE_PHASE_LOADING);
  next.mutable_version()->set_epoch(directive.epoch());
  next.mutable_version()->set_step(step);
  if (directive.has_decision() && directive.decision().step() == step) {
    *next.mutable_decision() = directive.decision();
  }
  report_ = std::move(next);
  job_ = map.job;
  placed_ = map.placed;
  chunks_ = map.chunks;
  valid_.clear();
  for (const auto& [number, chunk] : chunks_) {
    if (keep.contains(number)) {
      valid_.insert(number);
      orders->keep.push_back(number);
      continue;
    }
    if (map.copied.contains(number) || job_.base().step() == step) continue;
    orders->load = false;
    orders->keep.clear();
    Fail(absl::DataLossError(absl::StrCat(
        "chunk ", number, " of ", report_.run_id(), " is to be here at step ", step,
        ", but no store is named to copy it from, and the state to load is that of step ",
        job_.base().step())));
    break;
  }
  staging_.clear();
  for (const auto& [number, chunk] : chunks_) {
    if (chunk.trained) staging_.emplace(number, Coverage(static_cast<uint64_t>(chunk.size())));
  }
  ClearStaging();
}

void JobControl::TakeDecision(const v1::StepDecision& decision, Orders* orders) {
  const uint64_t here = report_.version().step();
  const uint64_t step = decision.step();
  const std::string name =
      absl::StrCat("step ", step, " of ", report_.run_id(), " (epoch ", decision.epoch(), ")");
  const v1::StepDecision* known = nullptr;
  if (applying_ && applying_->step() == step) known = &*applying_;
  if (report_.has_decision() && report_.decision().step() == step) known = &report_.decision();
  if (known != nullptr && !Same(*known, decision)) {
    Fail(
        absl::InternalError(absl::StrCat(name, " was decided twice, as ", known->ShortDebugString(),
                                         " and as ", decision.ShortDebugString())));
    return;
  }
  if (known != nullptr || step == here) return;
  if (step != here + 1 || report_.phase() != v1::STORE_PHASE_READY) {
    Fail(absl::DataLossError(absl::StrCat(
        name, " is decided, but the state here ",
        report_.phase() == v1::STORE_PHASE_LOADING ? "is being loaded as that of step "
                                                   : "is at step ",
        here, applying_ ? ", with the next being applied" : "", ": steps between are missing")));
    return;
  }
  if (!decision.skip() &&
      (report_.sealed_step() != step || decision.generation() != report_.generation())) {
    const std::string missing = MissingGradients();
    Fail(absl::DataLossError(
        absl::StrCat(name, " is decided with the gradients of generation ", decision.generation(),
                     ", which are not all here: generation ", report_.generation(), " is open",
                     missing.empty() ? "" : ", ", missing)));
    return;
  }
  report_.set_phase(v1::STORE_PHASE_APPLYING);
  applying_ = decision;
  applied_.clear();
  ClearStaging();
  orders->apply = decision;
}

void JobControl::TakeSnapshot(const v1::StoreDirective& directive, Orders* orders) {
  const bool same = snapshot_ && directive.has_snapshot() &&
                    snapshot_->step() == directive.snapshot().step() &&
                    snapshot_->folder() == directive.snapshot().folder();
  if (same) return;
  if (snapshot_ && snapshot_started_ && !report_.snapshot().done()) orders->cancel_snapshot = true;
  snapshot_.reset();
  snapshot_started_ = false;
  report_.clear_snapshot();
  if (directive.has_snapshot()) snapshot_ = directive.snapshot();
}

void JobControl::StartWhatWaits(Orders* orders) {
  const uint64_t here = report_.version().step();
  const bool ready = report_.phase() == v1::STORE_PHASE_READY;
  if (snapshot_ && !snapshot_started_ && !report_.has_snapshot()) {
    if (ready && snapshot_->step() == here) {
      snapshot_started_ = true;
      orders->snapshot = snapshot_;
    } else if (snapshot_->step() < here || (applying_ && snapshot_->step() == here)) {
      report_.mutable_snapshot()->set_step(snapshot_->step());
      report_.mutable_snapshot()->set_done(true);
      report_.mutable_snapshot()->set_problem(
          absl::StrCat("the state of step ", snapshot_->step(),
                       " was asked for when it was changed already: here it is at step ", here,
                       applying_ ? ", with the next being applied" : ""));
    }
  }
  if (ready && digest_wanted_ != 0 && digest_wanted_ == here && !digest_started_ &&
      report_.digest_step() != here) {
    digest_started_ = true;
    orders->digest_step = here;
  }
}

Orders JobControl::OnLoaded(const absl::Status& status) {
  Orders orders;
  if (report_.phase() != v1::STORE_PHASE_LOADING) return orders;
  if (!status.ok()) {
    Fail(status);
    return orders;
  }
  OnProgress();
  report_.set_phase(v1::STORE_PHASE_READY);
  for (const auto& [number, chunk] : chunks_) valid_.insert(number);
  MaybeSeal();
  StartWhatWaits(&orders);
  return orders;
}

void JobControl::OnChunkApplied(uint32_t chunk, uint32_t digest) {
  if (!applying_ || !chunks_.contains(chunk)) return;
  OnProgress();
  applied_[chunk] = digest;
}

Orders JobControl::OnApplied(const absl::Status& status) {
  Orders orders;
  if (!applying_) return orders;
  if (!status.ok()) {
    Fail(status);
    return orders;
  }
  OnProgress();
  // A skip may leave chunks alone, and their digests with them.
  if (!applying_->skip()) digests_.clear();
  for (const auto& [chunk, digest] : applied_) digests_[chunk] = digest;
  report_.clear_chunk_digests();
  if (job_.map().replicas() > 1) {
    const bool all = std::all_of(chunks_.begin(), chunks_.end(), [&](const auto& entry) {
      return !entry.second.trained || digests_.contains(entry.first);
    });
    if (all) {
      for (const auto& [number, chunk] : chunks_) {
        report_.add_chunk_digests(chunk.trained ? digests_.at(number) : 0);
      }
    }
  }
  report_.mutable_version()->set_step(applying_->step());
  *report_.mutable_decision() = *applying_;
  report_.set_phase(v1::STORE_PHASE_READY);
  applying_.reset();
  applied_.clear();
  if (waiting_) {
    const Waiting next = *std::exchange(waiting_, std::nullopt);
    Follow(next.directive, next.map, &orders);
  } else {
    MaybeSeal();
    StartWhatWaits(&orders);
  }
  return orders;
}

void JobControl::OnSnapshot(const v1::SnapshotReport& report) {
  if (!snapshot_ || !snapshot_started_ || report.step() != snapshot_->step()) return;
  *report_.mutable_snapshot() = report;
}

void JobControl::OnDigest(uint64_t step, uint64_t low, uint64_t high) {
  if (!std::exchange(digest_started_, false)) return;
  if (report_.phase() != v1::STORE_PHASE_READY || step != report_.version().step()) return;
  report_.set_digest_step(step);
  report_.set_digest_low(low);
  report_.set_digest_high(high);
}

void JobControl::Fail(const absl::Status& status) {
  if (!Held() || report_.phase() == v1::STORE_PHASE_FAILED || status.ok()) return;
  report_.set_phase(v1::STORE_PHASE_FAILED);
  report_.set_problem(std::string(status.message()));
  report_.set_error_code(absl::StatusCodeToString(status.code()));
  report_.set_sealed_step(0);
  applying_.reset();
  applied_.clear();
  valid_.clear();
  waiting_.reset();
}

// --- bulk ---------------------------------------------------------------------------------------

absl::Status JobControl::CheckStream(uint64_t generation) const {
  const std::string& run_id = report_.run_id();
  if (report_.dropped()) {
    return absl::FailedPreconditionError(absl::StrCat(run_id, " is over and was dropped here"));
  }
  if (generation < report_.generation()) {
    return absl::FailedPreconditionError(absl::StrCat("generation ", generation, " of ", run_id,
                                                      " is over; generation ", report_.generation(),
                                                      " is open here"));
  }
  if (generation > report_.generation()) {
    return absl::UnavailableError(absl::StrCat("generation ", generation, " of ", run_id,
                                               " is not open here yet; generation ",
                                               report_.generation(), " is"));
  }
  if (report_.phase() == v1::STORE_PHASE_FAILED) {
    return absl::UnavailableError(
        absl::StrCat("the state of ", run_id, " here is of no use: ", report_.problem()));
  }
  return absl::OkStatus();
}

absl::Status JobControl::CheckPeer(absl::string_view member, absl::string_view incarnation) const {
  const v1::StoreMap::Store* named = nullptr;
  for (const uint32_t index : placed_) {
    const v1::StoreMap::Store& store = job_.map().stores(static_cast<int>(index));
    if (store.member() != member) continue;
    if (store.incarnation() == incarnation) return absl::OkStatus();
    named = &store;
  }
  if (named != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("store ", member, " of incarnation ", Named(incarnation),
                     " asks for state of ", report_.run_id(), "; the map of version ",
                     report_.map_version(), " has its incarnation ", Named(named->incarnation())));
  }
  return absl::UnavailableError(absl::StrCat("store ", Named(member),
                                             " has no chunks in the map of ", report_.run_id(),
                                             " here, which is version ", report_.map_version()));
}

absl::Status JobControl::Admit(const v1::BulkHello& hello) {
  ZS_RETURN_IF_ERROR(CheckStream(hello.generation()));
  if (hello.store()) return CheckPeer(hello.member(), hello.incarnation());
  const auto found = ranks_.find(hello.rank());
  if (found == ranks_.end()) {
    if (ranks_.size() >= kMostRanks) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "rank ", hello.rank(), " of ", report_.run_id(), " asks for a stream in generation ",
          hello.generation(), ", in which ", kMostRanks, " others have had one: no job has more"));
    }
    ranks_.emplace(hello.rank(), std::make_pair(hello.member(), hello.incarnation()));
    return absl::OkStatus();
  }
  const auto& [member, incarnation] = found->second;
  if (member == hello.member() && incarnation == hello.incarnation()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "rank ", hello.rank(), " of ", report_.run_id(), " in generation ", hello.generation(),
      " is incarnation ", Named(incarnation), " of ", Named(member), ", not ",
      Named(hello.incarnation()), " of ", Named(hello.member())));
}

absl::Status JobControl::CheckElements(uint32_t chunk, uint32_t begin, uint32_t count) const {
  const auto found = chunks_.find(chunk);
  if (found == chunks_.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", chunk, " of ", report_.run_id(), " is not here; the map of version ",
                     report_.map_version(), " puts ", chunks_.size(), " others here"));
  }
  const auto size = static_cast<uint64_t>(found->second.size());
  if (count == 0 || uint64_t{begin} + count > size) {
    return absl::InvalidArgumentError(absl::StrCat(count, " elements from ", begin, " of chunk ",
                                                   chunk, " of ", report_.run_id(), ", which has ",
                                                   size));
  }
  return absl::OkStatus();
}

uint64_t JobControl::VersionOf(uint32_t chunk) const {
  return report_.version().step() + (applied_.contains(chunk) ? 1 : 0);
}

absl::Status JobControl::CheckPush(uint64_t generation, uint64_t epoch, uint64_t step,
                                   uint32_t chunk, uint32_t begin, uint32_t count) const {
  ZS_RETURN_IF_ERROR(CheckStream(generation));
  const std::string& run_id = report_.run_id();
  if (epoch != this->epoch()) {
    return absl::FailedPreconditionError(absl::StrCat("gradients of epoch ", epoch, " of ", run_id,
                                                      "; epoch ", this->epoch(), " is wanted"));
  }
  ZS_RETURN_IF_ERROR(CheckElements(chunk, begin, count));
  const auto staged = staging_.find(chunk);
  if (staged == staging_.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradients of chunk ", chunk, " of ", run_id, ", which is not trained"));
  }
  const uint64_t here = report_.version().step();
  const uint64_t wanted = here + (applying_ ? 2 : 1);
  const auto refuse = [&] {
    return absl::StrCat("gradients of step ", step, " for chunk ", chunk, " of ", run_id, "; step ",
                        wanted, " is wanted");
  };
  if (step < wanted && report_.phase() != v1::STORE_PHASE_LOADING) {
    return absl::AlreadyExistsError(absl::StrCat(refuse(), ", that one is decided"));
  }
  if (step != wanted) return absl::FailedPreconditionError(refuse());
  if (report_.phase() == v1::STORE_PHASE_LOADING || VersionOf(chunk) + 1 != wanted) {
    return absl::UnavailableError(
        absl::StrCat(refuse(), ", but the chunk does not have the version before yet"));
  }
  absl::Status status = staged->second.Check(begin, count);
  if (!status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", chunk, " of ", run_id, ", step ", step, ": ", status.message()));
  }
  return absl::OkStatus();
}

absl::Status JobControl::OnStaged(uint64_t generation, uint64_t epoch, uint64_t step,
                                  uint32_t chunk, uint32_t begin, uint32_t count) {
  const absl::Status status = CheckPush(generation, epoch, step, chunk, begin, count);
  if (absl::IsAlreadyExists(status)) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(status);
  Coverage& coverage = staging_.at(chunk);
  const uint64_t before = coverage.covered();
  ZS_RETURN_IF_ERROR(coverage.Add(begin, count));
  missing_ -= coverage.covered() - before;
  MaybeSeal();
  return absl::OkStatus();
}

absl::StatusOr<JobControl::Pull> JobControl::CheckPull(uint64_t generation, uint64_t epoch,
                                                       uint64_t step, uint32_t chunk,
                                                       uint32_t begin, uint32_t count) const {
  ZS_RETURN_IF_ERROR(CheckStream(generation));
  const std::string& run_id = report_.run_id();
  if (epoch != this->epoch()) {
    return absl::FailedPreconditionError(absl::StrCat("parameters of epoch ", epoch, " of ", run_id,
                                                      "; here is epoch ", this->epoch()));
  }
  ZS_RETURN_IF_ERROR(CheckElements(chunk, begin, count));
  const bool loading = report_.phase() == v1::STORE_PHASE_LOADING;
  if (!chunks_.at(chunk).trained) return loading ? Pull::kWait : Pull::kReady;
  const uint64_t here = report_.version().step();
  // What is being applied may have changed a part of the chunk already.
  const uint64_t oldest = here + (applying_ ? 1 : 0);
  if (step < oldest || step > oldest + 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("chunk ", chunk, " of ", run_id, " at step ", step, " is ",
                     step < oldest ? "gone" : "too far ahead", ": here it is at step ", here,
                     applying_ ? ", with the next being applied" : ""));
  }
  return !loading && step == VersionOf(chunk) ? Pull::kReady : Pull::kWait;
}

std::string JobControl::MissingGradients() const {
  std::string first;
  size_t more = 0;
  for (const auto& [number, coverage] : staging_) {
    if (coverage.complete()) continue;
    if (!first.empty()) {
      ++more;
      continue;
    }
    first = absl::StrCat("chunk ", number, " lacks ", coverage.size() - coverage.covered(), " of ",
                         coverage.size(), " elements, the first is ", coverage.FirstGap());
  }
  if (more != 0)
    absl::StrAppend(&first, " (and ", more, more == 1 ? " chunk" : " chunks", " more)");
  return first;
}

void JobControl::ClearStaging() {
  missing_ = 0;
  for (auto& [number, coverage] : staging_) {
    coverage.Clear();
    missing_ += coverage.size();
  }
  report_.set_sealed_step(0);
}

void JobControl::MaybeSeal() {
  if (report_.phase() != v1::STORE_PHASE_READY || report_.generation() == 0 || missing_ != 0) {
    return;
  }
  report_.set_sealed_step(report_.version().step() + 1);
}

}  // namespace zeroshard::store
