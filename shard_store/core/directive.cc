// What a directive must be like before it is followed.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/model_table.h"
#include "common/status_macros.h"
#include "shard_store/core/job_control.h"

namespace zeroshard::store {
namespace {

absl::Status Over(const std::string& run_id, const char* counter, uint64_t seen, uint64_t wanted) {
  return absl::FailedPreconditionError(absl::StrCat("a directive for ", run_id, " of ", counter,
                                                    " ", seen, "; here it is at ", counter, " ",
                                                    wanted, " already"));
}

}  // namespace

bool JobControl::NeedsMap(const v1::StoreDirective& directive) const {
  return !Held() || directive.epoch() != epoch() ||
         directive.map_version() != report_.map_version();
}

absl::Status JobControl::CheckCounters(const v1::StoreDirective& directive) const {
  const std::string& run_id = report_.run_id();
  const bool waits = waiting_.has_value();
  if (directive.term() < report_.term()) {
    return Over(run_id, "term", directive.term(), report_.term());
  }
  if (directive.drop()) return absl::OkStatus();
  if (report_.dropped()) {
    return absl::FailedPreconditionError(
        absl::StrCat(run_id, " is over and was dropped here; it does not come back"));
  }
  const uint64_t generation =
      std::max(report_.generation(), waits ? waiting_->directive.generation() : 0);
  if (directive.generation() < generation) {
    return Over(run_id, "generation", directive.generation(), generation);
  }
  if (!Held()) {
    if (directive.has_job()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("nothing of ", run_id, " is here: its map is wanted"));
  }
  if (directive.epoch() < epoch()) return Over(run_id, "epoch", directive.epoch(), epoch());
  if (directive.epoch() == epoch()) {
    const uint64_t version =
        std::max(report_.map_version(), waits ? waiting_->directive.map_version() : 0);
    if (directive.map_version() < version) {
      return Over(run_id, "map version", directive.map_version(), version);
    }
    const uint64_t known = applying_ ? applying_->step() : report_.version().step();
    const uint64_t step =
        directive.has_decision() ? directive.decision().step() : job_.base().step();
    if (step < known) return Over(run_id, "step", step, known);
  }
  if (NeedsMap(directive) && !directive.has_job()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a directive for ", run_id, " of epoch ", directive.epoch(), " and map version ",
        directive.map_version(), " without a map; here are epoch ", epoch(), " and map version ",
        report_.map_version(), ": the map is wanted"));
  }
  return absl::OkStatus();
}

absl::Status JobControl::CheckSelf(const v1::StoreDirective& directive,
                                   absl::string_view self) const {
  if (self.empty() || directive.drop()) return absl::OkStatus();
  const v1::StoreJob& job = directive.has_job() ? directive.job() : job_;
  if (job.store() >= static_cast<uint32_t>(job.map().stores_size())) return absl::OkStatus();
  const v1::StoreMap::Store& named = job.map().stores(static_cast<int>(job.store()));
  if (named.incarnation() == self) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      directive.has_job() ? "a directive for " : "what is here of ", report_.run_id(),
      " is of a map (version ",
      directive.has_job() ? directive.map_version() : report_.map_version(), ") for incarnation ",
      named.incarnation().empty() ? "(none)" : named.incarnation(), " of ", named.member(),
      "; this process is incarnation ", self));
}

absl::Status JobControl::CheckContents(const v1::StoreDirective& directive,
                                       const std::optional<Map>& map) const {
  const std::string& run_id = report_.run_id();
  if (directive.has_decision() && directive.decision().epoch() != directive.epoch()) {
    return absl::InvalidArgumentError(absl::StrCat("a directive for epoch ", directive.epoch(),
                                                   " of ", run_id, " with a decision for epoch ",
                                                   directive.decision().epoch()));
  }
  const std::map<uint32_t, Chunk>& chunks = map ? map->chunks : chunks_;
  for (const uint32_t chunk : directive.snapshot().chunks()) {
    if (chunks.contains(chunk)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "the snapshot of step ", directive.snapshot().step(), " of ", run_id, " is to have chunk ",
        chunk, " from here; wanted only chunks that the map ", "puts here"));
  }
  return absl::OkStatus();
}

absl::StatusOr<JobControl::Map> JobControl::ReadMap(const v1::StoreDirective& directive) const {
  const auto refuse = [&](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat("the map of ", directive.run_id(), " (version ",
                                                   directive.map_version(), "): ", what...));
  };
  Map map;
  map.job = directive.job();
  map.version = directive.map_version();
  const absl::StatusOr<ModelTable> model = MakeModelTable(map.job.spec().model());
  if (!model.ok()) return refuse("its model: ", model.status().message());
  const ChunkTable table = ChunkTable::Make(*model, chunk_elements_);
  map.table_size = table.chunks.size();

  const v1::StoreMap& stores = map.job.map();
  const auto store_count = static_cast<uint32_t>(stores.stores_size());
  if (stores.replicas() == 0 || stores.replicas() > store_count) {
    return refuse(stores.replicas(), " replicas; wanted 1 to ", store_count,
                  ", the number of stores");
  }
  if (map.job.store() >= store_count) {
    return refuse("this is to be store ", map.job.store(), " of ", store_count,
                  "; wanted less than that");
  }
  const uint64_t wanted = uint64_t{map.table_size} * stores.replicas();
  if (static_cast<uint64_t>(stores.placement_size()) != wanted) {
    return refuse(stores.placement_size(), " places; wanted ", wanted, ": of ", map.table_size,
                  " chunks ", stores.replicas(), " each");
  }
  for (uint64_t place = 0; place < wanted; ++place) {
    const uint32_t store = stores.placement(static_cast<int>(place));
    const auto chunk = static_cast<uint32_t>(place / stores.replicas());
    if (store >= store_count && store != kNoStore) {
      return refuse("chunk ", chunk, " is on store ", store, " of ", store_count);
    }
    if (store != kNoStore) map.placed.insert(store);
    if (store == map.job.store()) map.chunks.emplace(chunk, table.chunks[chunk]);
  }
  for (const v1::StoreJob::Copy& copy : map.job.copies()) {
    if (!map.chunks.contains(copy.chunk())) {
      return refuse("chunk ", copy.chunk(), " is to be copied, but its place is not here");
    }
    if (copy.from_store() >= store_count || copy.from_store() == map.job.store()) {
      return refuse("chunk ", copy.chunk(), " is to be copied from store ", copy.from_store(),
                    "; wanted another of the ", store_count, " stores");
    }
    map.copied.insert(copy.chunk());
  }
  if (map.job.base().epoch() != directive.epoch()) {
    return refuse("a base of epoch ", map.job.base().epoch(), "; wanted epoch ", directive.epoch());
  }
  if (!map.copied.empty() && map.job.copy().epoch() != directive.epoch()) {
    return refuse("copies of epoch ", map.job.copy().epoch(), "; wanted epoch ", directive.epoch());
  }
  return map;
}

}  // namespace zeroshard::store
