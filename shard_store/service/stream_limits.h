// How many Bulk streams a store serves at once: of peers that have not said who they are, of one
// rank (or store that copies) in one generation of a run, of one run. Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "absl/status/statusor.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::store {

class StreamLimits : public std::enable_shared_from_this<StreamLimits> {
 public:
  struct Most {
    int silent = 1024;
    int of_peer = 8;     // a rank uses two, a store that copies one for each that it copies from
    int of_run = 16384;  // of all generations
  };
  // Kept for as long as the stream counts. Outlives the limits.
  using Place = std::shared_ptr<const void>;

  static std::shared_ptr<StreamLimits> Make(const Most& most) {
    return std::shared_ptr<StreamLimits>(new StreamLimits(most));
  }

  // For a stream that has just arrived. UNAVAILABLE: too many have not said hello yet; come again.
  absl::StatusOr<Place> TakeSilent();
  // For one that says hello. RESOURCE_EXHAUSTED names the run, or the peer, that has too many.
  absl::StatusOr<Place> Take(const v1::BulkHello& hello);

 private:
  using Peer = std::tuple<std::string, bool, uint32_t, uint64_t>;  // run, store?, rank, generation

  explicit StreamLimits(const Most& most) : most_(most) {}

  const Most most_;
  std::mutex mutex_;
  int silent_ = 0;
  std::map<Peer, int> of_peer_;
  std::map<std::string, int> of_run_;
};

}  // namespace zeroshard::store
