// Which store holds which chunks of a job, as the page shows it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/chunk_table.h"
#include "coordinator/service/engine.h"
#include "nlohmann/json.hpp"

namespace zeroshard::coordinator {

// Pure; immutable once made.
class ShardView {
 public:
  static constexpr size_t kMostCells = 256;
  static constexpr size_t kMostRows = 200;

  // INTERNAL: the map is not that of the specification.
  static absl::StatusOr<ShardView> Make(const Engine::ShardMap& shards);

  // {"version":3,"replicas":2,"chunks":9,"chunk_elements":1048576,"cells":9,
  //  "stores":[{"member":"store-0","host":"a","chunks":6,"bytes":123,"held":[1,1,0..]}..],
  //  "first":0,"rows":[{"chunk":0,"unit":"embedding","begin":0,"end":1048576,"bytes":14680064,
  //                     "trained":true,"stores":[0,2]}..]}
  // Cell i of n stands for the chunks [i*chunks/n, (i+1)*chunks/n); `held` says how many of them a
  // store has. `bytes` are those of the state, without staging. At most kMostRows rows, from chunk
  // `first` on.
  nlohmann::ordered_json ToJson(size_t first, size_t rows) const;
  uint64_t version() const { return version_; }

 private:
  struct Store {
    std::string member, host;
    size_t chunks = 0;
    uint64_t bytes = 0;
    std::vector<uint32_t> held;  // by cell
  };

  uint64_t version_ = 0;
  uint32_t replicas_ = 1;
  std::vector<Chunk> chunks_;
  std::vector<ChunkBytes> bytes_;
  std::vector<std::string> units_;
  std::vector<uint32_t> placement_;
  std::vector<Store> stores_;
  size_t cells_ = 0;
};

}  // namespace zeroshard::coordinator
