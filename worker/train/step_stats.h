// What the ranks tell each other at the end of a step, and what they conclude: every rank computes
// the same loss, norm and verdict from the same bytes. Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/planner.h"
#include "common/plan/rank_mesh.h"
#include "worker/comm/communicator.h"
#include "worker/ops/norm_accumulator.h"

namespace zeroshard {

// One micro-batch of this rank.
struct RoundStats {
  double loss = 0;     // summed over its tokens
  int64_t tokens = 0;  // that count
};

// What a rank says about waiting and saving, at the end of a step and while all wait together.
struct RankFlags {
  uint8_t hold = 0;           // rank 0: wait before the next step
  uint8_t save_request = 0;   // SaveRequest
  uint8_t save_state = 0;     // SaveState (checkpointer.h)
  uint8_t save_progress = 0;  // 1: its part of a save moved since it last said so
};

// The fixed part of a rank's entry; kStatsFixedBytes on the wire, little endian.
struct RankVerdict {
  NormAccumulator norm;          // of this rank's shard of the gradient
  uint32_t nonfinite_unit = 0;   // index + 1 of the first unit whose gradient is not finite
  uint32_t nonfinite_round = 0;  // index + 1 of the first round whose loss or input gradient is not
  uint64_t nonfinite_sample = 0;  // first sample of that micro-batch
  RankFlags flags;
  uint32_t reserved = 0;
  uint64_t reserved2 = 0;
};
static_assert(sizeof(RankVerdict) == kStatsFixedBytes);
static_assert(sizeof(RoundStats) == kStatsRoundBytes);

struct StepTotals {
  double loss = 0;       // mean over tokens; 0 of none
  double grad_norm = 0;  // of the mean loss
  int64_t tokens = 0;    // that carry a loss
  // Something is not finite, and the step is to be skipped; loss and norm may not be finite either.
  bool overflow = false;
  bool hold = false;
};

// How the gradients of a step were scaled (common/spec/loss_scale.h).
struct StepScaling {
  float gradient = 1;           // MicroBatch::gradient_scale
  bool skips_overflow = false;  // a value that is not finite is no error
};

// The rank of a mesh that has the loss of micro-batch j and counts its tokens: of data index j mod
// D the first of the last stage's tensor ranks.
int LossRank(const MeshShape& shape, int64_t j);

class StepExchange {
 public:
  // G micro-batches of `micro_batch` samples a step, over the ranks of `comm`, which are the whole
  // job: a mesh of `shape`. Micro-batch j is data index j mod D's; of its ranks LossRank's entry
  // counts. Every rank has its own part of the norm.
  StepExchange(int64_t micro_batches, int64_t micro_batch, const MeshShape& shape,
               Communicator* comm);

  // Collective. INTERNAL names step, rank and samples (or the unit) of a non-finite value, unless
  // `scaling` skips it; otherwise the collective's errors. `rounds`: this rank's, in order (fewer
  // in a ragged last round). Also with an error flags() are this exchange's, unless it is the
  // collective's. `first_sample`: of the step, in the run's order.
  absl::StatusOr<StepTotals> Exchange(uint64_t step, int64_t first_sample,
                                      const StepScaling& scaling, const RankVerdict& verdict,
                                      const std::vector<RoundStats>& rounds,
                                      const std::vector<std::string>& unit_names);
  // Collective: the flags alone.
  absl::Status ExchangeFlags(uint64_t step, const RankFlags& own);
  // By rank, of the latest exchange of either kind.
  const std::vector<RankFlags>& flags() const { return flags_; }

 private:
  const RankVerdict& Verdict(int rank) const;
  RoundStats Round(int rank, int64_t round) const;
  absl::Status CheckRound(uint64_t step, int rank) const;
  absl::Status CheckFinite(uint64_t step, int64_t first_sample,
                           const std::vector<std::string>& unit_names) const;

  const int64_t micro_batches_;
  const int64_t micro_batch_;
  const MeshShape shape_;
  Communicator* comm_;
  const int64_t rounds_;
  std::vector<char> entries_;  // StatsBytes(rounds_) a rank
  std::vector<RankFlags> flags_;
};

}  // namespace zeroshard
