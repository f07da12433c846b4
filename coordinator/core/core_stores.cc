// The stores of offloaded jobs: where chunks go, what stores are told and what they say, and what
// the loss of one means.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/plan/nvme_bytes.h"
#include "common/plan/offload.h"
#include "coordinator/core/core.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

// A member that does not say how much it may hold is not limited here; it enforces its own limit.
constexpr uint64_t kUnknownLimit = uint64_t{1} << 60;

uint64_t LimitOf(const v1::Hello& hello, bool nvme) {
  if (nvme) return hello.nvme_bytes();
  return hello.memory_bytes() == 0 ? kUnknownLimit : hello.memory_bytes();
}

uint64_t SumOf(const StoreNeeds& needs, const std::vector<uint32_t>& chunks) {
  uint64_t bytes = chunks.empty() ? 0 : needs.fixed;
  for (const uint32_t chunk : chunks) bytes += needs.chunks[chunk];
  return bytes;
}

uint64_t SumOf(const v1::StoreUsage& usage) {
  return usage.master_bytes() + usage.exp_avg_bytes() + usage.exp_avg_sq_bytes() +
         usage.parameter_bytes() + usage.staging_bytes();
}

// What `needs` finds on a store (`hello`; null: known from the log alone) where other jobs have
// `taken` of the wanted kind and `memory_taken` of its memory.
StoreRoom RoomOn(const std::string& member, const std::string& host, uint64_t limit,
                 const v1::Hello* hello, const StoreNeeds& needs, uint64_t memory_taken,
                 uint64_t taken) {
  StoreRoom room{member, host, limit, taken + needs.fixed};
  if (hello != nullptr && needs.memory != 0) {
    const uint64_t memory = LimitOf(*hello, false);
    if (memory < needs.memory || memory - needs.memory < memory_taken) room.limit = 0;
  }
  return room;
}

// Stores that are not lost have every chunk.
bool IsWhole(const OffloadedRun& o) {
  std::vector<bool> held(o.needs.chunks.size(), false);
  for (size_t store = 0; store < o.slots.size(); ++store) {
    if (o.slots[store].lost) continue;
    for (const uint32_t chunk : o.Held(store)) held[chunk] = true;
  }
  return std::all_of(held.begin(), held.end(), [](bool one) { return one; });
}

bool IsAside(const OffloadedRun& o, const std::string& incarnation) {
  const auto trouble = o.troubles.find(incarnation);
  return trouble != o.troubles.end() && trouble->second.aside;
}

}  // namespace

const Member* Core::MemberOf(const StoreSlot& slot) const {
  const Member* member = members_.Find(slot.store.member());
  return member != nullptr && member->hello.incarnation() == slot.store.incarnation() ? member
                                                                                      : nullptr;
}

Core::StoreUse Core::ReservedOn(const std::string& member, const std::string& incarnation,
                                const Run* except) const {
  StoreUse use;
  const auto add = [this, &use](bool nvme, uint64_t bytes) {
    (nvme ? use.nvme : use.memory) += bytes;
    if (nvme && bytes != 0) use.memory += NvmeMemoryBytes(options_.chunk_elements);
    ++use.jobs;
  };
  for (const auto& [run_id, run] : runs_) {
    if (run.offload == nullptr || &run == except || IsEnded(run.job.state)) continue;
    for (const StoreSlot& slot : run.offload->slots) {
      if (slot.store.incarnation() == incarnation) add(run.offload->needs.nvme, slot.bytes);
    }
    if (!IsAside(*run.offload, incarnation)) continue;
    add(run.offload->needs.nvme, run.offload->troubles.at(incarnation).bytes);
  }
  const auto end = leftovers_.end();
  for (auto it = leftovers_.lower_bound({member, ""}); it != end && it->first.first == member;
       ++it) {
    if (it->second.incarnation == incarnation) add(it->second.nvme, it->second.bytes);
  }
  return use;
}

std::vector<StoreCandidate> Core::Candidates(const Run& run, Stores stores,
                                             absl::Duration now) const {
  std::vector<StoreCandidate> candidates;
  const OffloadedRun& o = *run.offload;
  const auto add = [&](const v1::StoreMap::Store& store, uint64_t limit, const v1::Hello* hello) {
    StoreCandidate& candidate = candidates.emplace_back();
    candidate.store = store;
    const StoreUse use = ReservedOn(store.member(), store.incarnation(), &run);
    candidate.room = RoomOn(store.member(), store.host(), limit, hello, o.needs, use.memory,
                            o.needs.nvme ? use.nvme : use.memory);
  };
  const auto rests = [&](const std::string& incarnation) {
    const auto trouble = o.troubles.find(incarnation);
    return stores != Stores::kAny && trouble != o.troubles.end() &&
           now < trouble->second.rests_until;
  };
  std::set<std::string> known;
  for (const StoreSlot& slot : o.slots) {
    const Member* member = MemberOf(slot);
    const bool again = slot.failed && member != nullptr && stores != Stores::kWell &&
                       !rests(slot.store.incarnation());
    if (slot.lost && !again) {
      if (slot.failed) known.insert(slot.store.incarnation());
      continue;
    }
    known.insert(slot.store.incarnation());
    // One that is known from the log alone may still come back with what it holds.
    add(slot.store, member == nullptr ? slot.bytes : LimitOf(member->hello, o.needs.nvme),
        member == nullptr ? nullptr : &member->hello);
  }
  for (const auto& [name, member] : members_.all()) {
    const v1::Hello& hello = member.hello;
    if (member.lost || member.session == 0 || hello.kind() != v1::MEMBER_KIND_STORE) continue;
    if (member.leaving) continue;
    if (known.contains(hello.incarnation()) || o.forgot.contains(hello.incarnation())) continue;
    if (rests(hello.incarnation())) continue;
    v1::StoreMap::Store store;
    store.set_member(name);
    store.set_incarnation(hello.incarnation());
    store.set_host(hello.host());
    store.set_address(hello.address());
    add(store, LimitOf(hello, o.needs.nvme), &hello);
  }
  return candidates;
}

absl::Status Core::CanEverFit(const v1::JobSpec& spec) const {
  absl::StatusOr<StoreNeeds> needs = MakeStoreNeeds(spec, options_.chunk_elements);
  if (!needs.ok()) return needs.status();
  std::vector<StoreRoom> rooms;
  for (const auto& [name, member] : members_.all()) {
    if (member.lost || member.hello.kind() != v1::MEMBER_KIND_STORE) continue;
    rooms.push_back(RoomOn(name, member.hello.host(), LimitOf(member.hello, needs->nvme),
                           &member.hello, *needs, 0, 0));
  }
  if (rooms.empty()) return absl::OkStatus();  // some may come
  const auto placed = PlaceChunks(*needs, needs->replicas, rooms);
  if (placed.ok()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "job ", spec.name(),
      " does not fit the shard stores, also when they are empty: ", placed.status().message(),
      ". Start more stores, or give them a higher --memory-limit or --nvme-limit"));
}

bool Core::PlaceNew(Run& run, absl::Duration now, std::vector<StoreCandidate>* candidates,
                    std::vector<uint32_t>* placement, std::string* why) const {
  *candidates = Candidates(run, Stores::kWell, now);
  if (candidates->empty()) {
    *why = "needs a shard store; none has joined";
    return false;
  }
  auto placed = PlaceChunks(run.offload->needs, run.offload->needs.replicas, RoomsOf(*candidates));
  if (!placed.ok()) {
    *why = absl::StrCat("waits for room on the shard stores: ", placed.status().message());
    return false;
  }
  *placement = *std::move(placed);
  return true;
}

void Core::SetMap(Run& run, const std::vector<StoreCandidate>& candidates,
                  const std::vector<uint32_t>& placement, uint32_t replicas,
                  const std::vector<std::vector<uint32_t>>& holders, const Moment& moment,
                  Decision* out) {
  OffloadedRun& o = *run.offload;
  StoreMapRecord& map = o.map;
  if (map.map_version == 0) {
    map.run_id = run.job.run_id;
    map.job.mutable_base()->set_epoch(1);
    map.job.mutable_base()->set_step(run.job.first_step - 1);
    map.job.set_checkpoint(run.job.resume.checkpoint());
    map.job.set_weights_only(run.job.resume.weights_only());
    map.next_sample = run.job.first_sample;
    if (run.job.resume.has_loss_scale())
      *map.job.mutable_loss_scale() = run.job.resume.loss_scale();
  }
  ++map.map_version;
  map.copies.clear();
  map.job.clear_copy();

  std::vector<uint32_t> index(candidates.size(), 0);
  v1::StoreMap stores;
  stores.set_replicas(replicas);
  const std::set<uint32_t> used(placement.begin(), placement.end());
  for (const uint32_t candidate : used) {
    index[candidate] = static_cast<uint32_t>(stores.stores_size());
    *stores.add_stores() = candidates[candidate].store;
  }
  for (size_t place = 0; place < placement.size(); ++place) {
    stores.add_placement(index[placement[place]]);
    if (o.AtBase() || holders.empty()) continue;
    const size_t chunk = place / replicas;
    const std::vector<uint32_t>& have = holders[chunk];
    if (std::find(have.begin(), have.end(), placement[place]) != have.end()) continue;
    map.copies.push_back(
        {index[placement[place]], static_cast<uint32_t>(chunk), index[have[chunk % have.size()]]});
  }
  if (!map.copies.empty()) {
    map.job.mutable_copy()->set_epoch(o.epoch());
    map.job.mutable_copy()->set_step(run.job.committed_step);
  }
  *map.job.mutable_map() = std::move(stores);
  out->records.push_back(map);

  std::vector<StoreSlot> before = std::exchange(o.slots, MakeSlots(o, moment.now));
  for (StoreSlot& old : before) {
    bool stays = false;
    for (StoreSlot& slot : o.slots) {
      if (slot.store.incarnation() != old.store.incarnation()) continue;
      stays = true;
      slot.heard = old.heard;
      slot.was_ready = old.was_ready && !old.lost && slot.chunks == old.chunks;
      slot.report = std::move(old.report);
      slot.told_session = old.told_session;
      slot.told_map = old.told_map;
      slot.told = std::move(old.told);
      break;
    }
    if (stays || MemberOf(old) == nullptr) continue;
    const auto trouble = o.troubles.find(old.store.incarnation());
    if (old.failed && trouble != o.troubles.end()) {
      trouble->second.aside = true;
      trouble->second.bytes = old.bytes;
      schedule_again_ = true;
    } else {
      ForgetOn(run, old, moment, out);
    }
  }
  for (const StoreSlot& slot : o.slots) {
    const auto trouble = o.troubles.find(slot.store.incarnation());
    if (trouble != o.troubles.end()) trouble->second.aside = false;
  }
  Touch(run);
}

std::vector<StoreSlot> Core::MakeSlots(const OffloadedRun& o, absl::Duration now) {
  std::vector<StoreSlot> slots;
  const v1::StoreMap& map = o.map.job.map();
  std::vector<std::vector<uint32_t>> chunks = ChunksOfStores(map);
  for (int store = 0; store < map.stores_size(); ++store) {
    StoreSlot& slot = slots.emplace_back();
    slot.store = map.stores(store);
    slot.chunks = std::move(chunks[static_cast<size_t>(store)]);
    slot.bytes = SumOf(o.needs, slot.chunks);
    slot.last_change = now;
  }
  return slots;
}

void Core::Touch(const Run& run) {
  if (run.offload != nullptr) touched_.insert(run.job.run_id);
}

void Core::SyncStores(Run& run, Decision* out) {
  OffloadedRun& o = *run.offload;
  if (o.map.map_version == 0) return;
  for (size_t store = 0; store < o.slots.size(); ++store) {
    StoreSlot& slot = o.slots[store];
    const Member* member = MemberOf(slot);
    if ((slot.lost && !slot.failed) || member == nullptr || member->session == 0) continue;
    v1::CoordinatorMessage message;
    v1::StoreDirective& directive = *message.mutable_store();
    directive.set_term(term_);
    directive.set_run_id(run.job.run_id);
    directive.set_generation(run.job.generation);
    directive.set_epoch(o.epoch());
    directive.set_map_version(o.map.map_version);
    if (o.decided) *directive.mutable_decision() = o.decided->decision;
    FillSnapshotOrder(run, store, &directive);
    if (run.job.committed_step == run.job.spec.steps()) {
      directive.set_digest_step(run.job.committed_step);
    }
    std::string text = directive.SerializeAsString();
    const bool new_stream = slot.told_session != member->session;
    const bool has_map = !new_stream && slot.told_map == o.map.map_version;
    if (has_map && slot.told == text) continue;
    if (!has_map) {
      v1::StoreJob& job = *directive.mutable_job();
      job = o.map.job;
      job.set_job(run.job.spec.name());
      *job.mutable_spec() = run.job.spec;
      job.set_store(static_cast<uint32_t>(store));
      for (const StoreMapRecord::Copy& copy : o.map.copies) {
        if (copy.to_store != store) continue;
        v1::StoreJob::Copy& entry = *job.add_copies();
        entry.set_chunk(copy.chunk);
        entry.set_from_store(copy.from_store);
      }
      if (job.copies().empty()) job.clear_copy();
    }
    slot.told_session = member->session;
    slot.told_map = o.map.map_version;
    slot.told = std::move(text);
    out->actions.push_back(SendToSession{member->session, std::move(message)});
  }
}

// --- jobs that are over on a store --------------------------------------------------------------

void Core::SendDrop(const Member& member, const std::string& run_id, uint64_t generation,
                    uint64_t epoch, Decision* out) const {
  if (member.session == 0) return;
  v1::CoordinatorMessage message;
  v1::StoreDirective& directive = *message.mutable_store();
  directive.set_term(term_);
  directive.set_run_id(run_id);
  directive.set_generation(generation);
  directive.set_epoch(epoch);
  directive.set_drop(true);
  out->actions.push_back(SendToSession{member.session, std::move(message)});
}

void Core::ForgetOn(Run& run, const StoreSlot& slot, const Moment& moment, Decision* out) {
  run.offload->forgot.insert(slot.store.incarnation());
  const Member* member = MemberOf(slot);
  if (member == nullptr) return;
  Leftover& left = leftovers_[{slot.store.member(), run.job.run_id}];
  left = {slot.store.incarnation(), slot.bytes,           run.offload->needs.nvme,
          run.job.generation,       run.offload->epoch(), moment.now};
  SendDrop(*member, run.job.run_id, left.generation, left.epoch, out);
}

void Core::CheckLeftovers(const Moment& moment, Decision* out) {
  for (auto it = leftovers_.begin(); it != leftovers_.end();) {
    const Member* member = members_.Find(it->first.first);
    Leftover& left = it->second;
    if (member == nullptr || member->hello.incarnation() != left.incarnation) {
      it = leftovers_.erase(it);
      schedule_again_ = true;
      continue;
    }
    if (moment.now - left.told >= options_.member_timeout) {
      left.told = moment.now;
      SendDrop(*member, it->first.second, left.generation, left.epoch, out);
    }
    ++it;
  }
}

// --- what stores say ----------------------------------------------------------------------------

void Core::OnStoreHello(const Member& member, const Moment& moment, Decision* out) {
  const std::string name = member.hello.name();
  for (auto& [run_id, run] : runs_) {
    if (run.offload == nullptr || IsEnded(run.job.state)) continue;
    for (size_t store = 0; store < run.offload->slots.size(); ++store) {
      StoreSlot& slot = run.offload->slots[store];
      if (slot.store.member() != name) continue;
      if (slot.store.incarnation() == member.hello.incarnation()) {
        Touch(run);
      } else if (!slot.lost) {
        LoseSlot(run, store, "its process was started again and holds nothing of the job", moment,
                 out);
        break;  // the slots may be others now
      }
    }
  }
}

void Core::OnStoreReport(const Member& member, const v1::StoreReport& report, const Moment& moment,
                         Decision* out) {
  if (member.hello.kind() != v1::MEMBER_KIND_STORE) return;
  const std::pair<std::string, std::string> key{member.hello.name(), report.run_id()};
  const auto found = runs_.find(report.run_id());
  Run* run = found == runs_.end() || IsEnded(found->second.job.state) ? nullptr : &found->second;
  OffloadedRun* o = run == nullptr ? nullptr : run->offload.get();
  size_t store = 0;
  if (o != nullptr) {
    while (store < o->slots.size() &&
           o->slots[store].store.incarnation() != member.hello.incarnation()) {
      ++store;
    }
  }
  if (o == nullptr || store == o->slots.size()) {
    if (o != nullptr && IsAside(*o, member.hello.incarnation())) {
      if (!report.dropped()) return;
      o->troubles.erase(member.hello.incarnation());
    }
    if (report.dropped()) {
      leftovers_.erase(key);
      if (o != nullptr) o->forgot.insert(member.hello.incarnation());
      schedule_again_ = true;
      return;
    }
    if (leftovers_.contains(key)) return;  // told already
    if (o != nullptr) o->forgot.insert(member.hello.incarnation());
    Leftover& left = leftovers_[key];
    left.incarnation = member.hello.incarnation();
    left.nvme = report.usage().nvme_bytes() != 0;
    left.bytes = left.nvme ? report.usage().nvme_bytes() : SumOf(report.usage());
    left.generation = report.generation();
    left.epoch = report.version().epoch();
    left.told = moment.now;
    SendDrop(member, report.run_id(), left.generation, left.epoch, out);
    return;
  }
  StoreSlot& slot = o->slots[store];
  if (slot.lost && !slot.failed) return;
  const bool advanced = !slot.heard || slot.report.progress() != report.progress() ||
                        slot.report.phase() != report.phase() ||
                        slot.report.version().step() != report.version().step() ||
                        slot.report.generation() != report.generation();
  slot.report = report;
  slot.heard = true;
  if (advanced || report.snapshot().done()) slot.last_change = moment.now;
  JudgeReport(*run, store, advanced, moment, out);
}

void Core::JudgeReport(Run& run, size_t store, bool advanced, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  StoreSlot& slot = o.slots[store];
  const v1::StoreReport& report = slot.report;
  const uint64_t committed = run.job.committed_step;
  const bool later =
      report.version().epoch() > o.epoch() ||
      (report.version().epoch() == o.epoch() &&
       (report.version().step() > committed || report.map_version() > o.map.map_version)) ||
      report.generation() > run.job.generation;
  if (later) {
    EndSaved(run,
             absl::StrCat(NameOfStore(slot.store), " has generation ", report.generation(),
                          ", map ", report.map_version(), " and step ", report.version().step(),
                          " of epoch ", report.version().epoch(),
                          " of the job, but this coordinator's log ends at generation ",
                          run.job.generation, ", map ", o.map.map_version, " and step ", committed,
                          " of epoch ", o.epoch(),
                          ": its data folder is older than what it decided. Nothing is rolled back "
                          "to match it"),
             moment, out);
    return;
  }
  if (report.dropped()) {
    o.forgot.insert(slot.store.incarnation());
    LoseSlot(run, store, "it has forgotten the job", moment, out);
    return;
  }
  const bool current =
      report.version().epoch() == o.epoch() && report.map_version() == o.map.map_version;
  if (!current || slot.lost) return;
  if (report.phase() == v1::STORE_PHASE_FAILED) {
    StoreFailed(run, store, moment, out);
    return;
  }
  const bool first_ready = !slot.was_ready && report.phase() != v1::STORE_PHASE_LOADING;
  slot.was_ready |= first_ready;
  if (Starting(run) && (first_ready || (advanced && report.phase() == v1::STORE_PHASE_LOADING))) {
    run.start_deadline = std::max(run.start_deadline, moment.now + StartTimeout(run.job.spec));
  }
  if (advanced && report.version().step() == committed) {
    // Ranks waited for that.
    for (RankState& rank : run.ranks) rank.last_advance = moment.now;
  }
  if (advanced && o.finish_deadline) {
    o.finish_deadline = std::max(*o.finish_deadline, moment.now + SaveTimeout(run.job.spec));
  }
  out->actions.push_back(RunChanged{run.job.run_id});
  OnSnapshotReport(run, moment, out);
  if (IsEnded(run.job.state)) return;
  MaybeAssign(run, moment, out);
  TryDecide(run, moment, out);
  if (IsEnded(run.job.state)) return;
  MaybeSnapshotNow(run, moment, out);
  MaybeFinish(run, moment, out);
  if (!IsEnded(run.job.state) && !run.Live()) schedule_again_ = true;
}

int Core::Remember(Run& run, const StoreSlot& slot, const std::string& what, const Moment& moment) {
  StoreTrouble& trouble = run.offload->troubles[slot.store.incarnation()];
  if (moment.now >= trouble.rests_until + options_.store_rest_limit) trouble.failures = 0;
  ++trouble.failures;
  trouble.store = slot.store;
  trouble.what = absl::StrCat(NameOfStore(slot.store), ": ", what);
  // Another process that did not answer, or one bit of what was there, says little of the store.
  const bool forgiven = slot.was_ready || IsNetworkCode(slot.report.error_code());
  const int before = trouble.failures - (forgiven ? 2 : 1);
  trouble.rests_until = moment.now;
  if (before >= 0) {
    const int doubled = std::min(before, 20);
    trouble.rests_until +=
        std::min(options_.store_rest * (int64_t{1} << doubled), options_.store_rest_limit);
  }
  return trouble.failures;
}

void Core::StoreFailed(Run& run, size_t store, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  StoreSlot& slot = o.slots[store];
  const std::string says = absl::StrCat(slot.report.error_code(), ": ", slot.report.problem());
  const int failures = Remember(run, slot, says, moment);
  const bool network = IsNetworkCode(slot.report.error_code());
  // Whether it was ready is not known after a start; once steps are committed it has been.
  const bool loading = o.AtBase() && !slot.was_ready;
  slot.failed = true;
  slot.lost = says;
  const bool again_and_again = !network && failures > kMaxRecoveries;
  if (((loading && !network) || again_and_again) && !HasRoom(run, Stores::kWell, moment.now)) {
    std::vector<std::string> others;
    for (const auto& [incarnation, trouble] : o.troubles) {
      if (incarnation != slot.store.incarnation()) others.push_back(trouble.what);
    }
    EndSaved(
        run,
        absl::StrCat(NameOfStore(slot.store),
                     loading ? " cannot load its part of the job: "
                             : absl::StrCat(" lost its part of the job for the ", failures,
                                            "th time in a short while: "),
                     says, "; no other shard store has room for it",
                     others.empty() ? "" : absl::StrCat(" (failed too: ", AtMostThree(others), ")"),
                     ". Mend or empty what it names, or start another store, and submit the "
                     "job again"),
        moment, out);
    return;
  }
  const bool covered =
      loading ? failures == 1 && !network : HasRoom(run, Stores::kWell, moment.now) && IsWhole(o);
  LoseSlot(run, store, absl::StrCat("its state of the job is of no use any more: ", says), moment,
           out, covered ? Cause::kCovered : Cause::kFailure);
}

void Core::LoseStore(const std::string& name, const std::string& incarnation,
                     const std::string& reason, const Moment& moment, Decision* out) {
  for (auto it = leftovers_.lower_bound({name, ""});
       it != leftovers_.end() && it->first.first == name;) {
    it = it->second.incarnation == incarnation ? leftovers_.erase(it) : std::next(it);
  }
  for (auto& [run_id, run] : runs_) {
    if (run.offload == nullptr || IsEnded(run.job.state)) continue;
    if (run.offload->troubles.erase(incarnation) != 0) schedule_again_ = true;
    for (size_t store = 0; store < run.offload->slots.size(); ++store) {
      StoreSlot& slot = run.offload->slots[store];
      if (slot.store.incarnation() != incarnation || slot.store.member() != name) continue;
      slot.failed = false;
      if (!slot.lost) LoseSlot(run, store, reason, moment, out);
      break;
    }
  }
}

void Core::LoseSlot(Run& run, size_t store, const std::string& reason, const Moment& moment,
                    Decision* out, Cause cause) {
  StoreSlot& slot = run.offload->slots[store];
  slot.lost = reason;
  slot.lost_at = moment.now;
  const std::string text = absl::StrCat(NameOfStore(slot.store), ": ", reason);
  DropSnapshot(run, text, out);
  if (run.Live()) {
    Recover(run, text, moment, out, cause);
    return;
  }
  AddEvent(run, text, moment, out);
  schedule_again_ = true;
}

}  // namespace zeroshard::coordinator
