#include "coordinator/service/page/shard_view.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/plan/model_table.h"
#include "common/plan/offload.h"
#include "common/plan/zero_policy.h"
#include "common/status_macros.h"

namespace zeroshard::coordinator {

using Json = nlohmann::ordered_json;

absl::StatusOr<ShardView> ShardView::Make(const Engine::ShardMap& shards) {
  ZS_ASSIGN_OR_RETURN(const ModelTable model, MakeModelTable(shards.spec.model()));
  ShardView view;
  view.version_ = shards.version;
  view.replicas_ = std::max<uint32_t>(1, shards.map.replicas());
  view.chunks_ = ChunkTable::Make(model).chunks;
  view.placement_.assign(shards.map.placement().begin(), shards.map.placement().end());
  for (const UnitTable& unit : model.units) view.units_.push_back(unit.name);
  for (const auto& store : shards.map.stores()) {
    view.stores_.push_back(Store{store.member(), store.host(), 0, 0, {}});
  }
  const size_t count = view.chunks_.size();
  if (view.placement_.size() != count * view.replicas_) {
    return absl::InternalError(absl::StrCat("the shard map has ", view.placement_.size(),
                                            " places for ", count, " chunks on ", view.replicas_,
                                            " stores each"));
  }
  view.cells_ = std::min(kMostCells, count);
  for (Store& store : view.stores_) store.held.assign(view.cells_, 0);
  const DType type = ComputeType(shards.spec);
  size_t cell = 0;
  for (size_t chunk = 0; chunk < count; ++chunk) {
    while (chunk >= (cell + 1) * count / view.cells_) ++cell;
    view.bytes_.push_back(BytesOf(view.chunks_[chunk], type, UsesSgd(shards.spec)));
    for (uint32_t replica = 0; replica < view.replicas_; ++replica) {
      const uint32_t place = view.placement_[chunk * view.replicas_ + replica];
      if (place >= view.stores_.size()) {
        return absl::InternalError(absl::StrCat("the shard map names store ", place, " of ",
                                                view.stores_.size(), " for chunk ", chunk));
      }
      Store& store = view.stores_[place];
      ++store.chunks;
      store.bytes += view.bytes_.back().State();
      ++store.held[cell];
    }
  }
  return view;
}

Json ShardView::ToJson(size_t first, size_t rows) const {
  Json json = {{"version", version_},      {"replicas", replicas_},
               {"chunks", chunks_.size()}, {"chunk_elements", kChunkElements},
               {"cells", cells_},          {"stores", Json::array()},
               {"first", first},           {"rows", Json::array()}};
  for (const Store& store : stores_) {
    json["stores"].push_back({{"member", store.member},
                              {"host", store.host},
                              {"chunks", store.chunks},
                              {"bytes", store.bytes},
                              {"held", store.held}});
  }
  for (size_t i = first; i < chunks_.size() && i - first < std::min(rows, kMostRows); ++i) {
    const Chunk& chunk = chunks_[i];
    Json places = Json::array();
    for (uint32_t replica = 0; replica < replicas_; ++replica) {
      places.push_back(placement_[i * replicas_ + replica]);
    }
    json["rows"].push_back({{"chunk", i},
                            {"unit", units_[static_cast<size_t>(chunk.unit)]},
                            {"begin", chunk.begin},
                            {"end", chunk.end},
                            {"bytes", bytes_[i].State()},
                            {"trained", chunk.trained},
                            {"stores", std::move(places)}});
  }
  return json;
}

}  // namespace zeroshard::coordinator
