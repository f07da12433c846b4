#include "worker/train/step_stats.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_format.h"
#include "common/status_macros.h"
#include "common/status_payloads.h"

namespace zeroshard {

int LossRank(const MeshShape& shape, int64_t j) {
  return RankAt(shape, {.pipeline = shape.pipeline - 1, .data = static_cast<int>(j % shape.data)});
}

StepExchange::StepExchange(int64_t micro_batches, int64_t micro_batch, const MeshShape& shape,
                           Communicator* comm)
    : micro_batches_(micro_batches),
      micro_batch_(micro_batch),
      shape_(shape),
      comm_(comm),
      rounds_(CeilDiv(micro_batches, shape.data)),
      entries_(static_cast<size_t>(StatsBytes(rounds_) * comm->size())),
      flags_(static_cast<size_t>(comm->size())) {}

const RankVerdict& StepExchange::Verdict(int rank) const {
  return *reinterpret_cast<const RankVerdict*>(entries_.data() + rank * StatsBytes(rounds_));
}

RoundStats StepExchange::Round(int rank, int64_t round) const {
  RoundStats stats;
  std::memcpy(
      &stats,
      entries_.data() + rank * StatsBytes(rounds_) + kStatsFixedBytes + round * kStatsRoundBytes,
      sizeof(stats));
  return stats;
}

absl::Status StepExchange::CheckRound(uint64_t step, int rank) const {
  const RankVerdict& v = Verdict(rank);
  if (v.nonfinite_round == 0) return absl::OkStatus();
  const int64_t round = v.nonfinite_round - 1;
  const int64_t j = round * shape_.data + PositionOf(shape_, rank).data;
  const double loss = Round(rank, round).loss;
  absl::Status status = absl::InternalError(absl::StrFormat(
      "step %d: %s on rank %d in micro-batch %d, samples %d to %d of the run's order, counted "
      "from 0; nothing was updated. Look at these samples, lower the learning rate, or train in "
      "fp32",
      step,
      std::isfinite(loss) ? std::string("non-finite gradient")
                          : absl::StrFormat("non-finite loss (%g)", loss),
      rank, j, v.nonfinite_sample, v.nonfinite_sample + static_cast<uint64_t>(micro_batch_) - 1));
  SetBlamedRank(static_cast<uint32_t>(rank), &status);
  MarkNonFinite(&status);
  return status;
}

absl::Status StepExchange::CheckFinite(uint64_t step, int64_t first_sample,
                                       const std::vector<std::string>& unit_names) const {
  // Losses first, which are the last stage's.
  const int of_a_stage = shape_.data * shape_.tensor;
  for (int stage = shape_.pipeline - 1; stage >= 0; --stage) {
    for (int i = 0; i < of_a_stage; ++i)
      ZS_RETURN_IF_ERROR(CheckRound(step, stage * of_a_stage + i));
  }
  for (int rank = 0; rank < comm_->size(); ++rank) {
    const RankVerdict& v = Verdict(rank);
    if (v.nonfinite_unit == 0) continue;
    const size_t unit = v.nonfinite_unit - 1;
    absl::Status status = absl::InternalError(absl::StrFormat(
        "step %d: non-finite gradient of %s in the shard of rank %d, although every loss is "
        "finite; nothing was updated. Samples %d to %d of the run's order. Lower the learning "
        "rate, or train in fp32",
        step, unit < unit_names.size() ? unit_names[unit] : "a unit", rank, first_sample,
        first_sample + micro_batches_ * micro_batch_ - 1));
    SetBlamedRank(static_cast<uint32_t>(rank), &status);
    MarkNonFinite(&status);
    return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<StepTotals> StepExchange::Exchange(uint64_t step, int64_t first_sample,
                                                  const StepScaling& scaling,
                                                  const RankVerdict& verdict,
                                                  const std::vector<RoundStats>& rounds,
                                                  const std::vector<std::string>& unit_names) {
  char* own = entries_.data() + comm_->rank() * StatsBytes(rounds_);
  std::memset(own, 0, static_cast<size_t>(StatsBytes(rounds_)));
  std::memcpy(own, &verdict, sizeof(verdict));
  if (!rounds.empty())
    std::memcpy(own + kStatsFixedBytes, rounds.data(), rounds.size() * sizeof(RoundStats));
  const CollectiveInfo info{.phase = Phase::kStep, .unit = "step totals", .step = step};
  ZS_RETURN_IF_ERROR(comm_->AllGatherHost(entries_.data(), StatsBytes(rounds_), info));
  for (int rank = 0; rank < comm_->size(); ++rank)
    flags_[static_cast<size_t>(rank)] = Verdict(rank).flags;
  StepTotals totals;
  if (const absl::Status finite = CheckFinite(step, first_sample, unit_names); !finite.ok()) {
    if (!scaling.skips_overflow) return finite;
    totals.overflow = true;
  }
  double loss = 0;
  NormAccumulator norm;
  for (int64_t j = 0; j < micro_batches_; ++j) {
    const RoundStats r = Round(LossRank(shape_, j), j / shape_.data);
    loss += r.loss;
    totals.tokens += r.tokens;
  }
  for (int rank = 0; rank < comm_->size(); ++rank) norm.Add(Verdict(rank).norm);
  totals.hold = flags_[0].hold != 0;
  if (totals.tokens == 0) return totals;
  totals.loss = loss / static_cast<double>(totals.tokens);
  totals.grad_norm = std::sqrt(norm.Value()) /
                     (static_cast<double>(scaling.gradient) * static_cast<double>(totals.tokens));
  // One NaN for all: which bits a sum gives depends on the order in which the compiler adds.
  if (!std::isfinite(totals.loss)) totals.loss = std::numeric_limits<double>::quiet_NaN();
  return totals;
}

absl::Status StepExchange::ExchangeFlags(uint64_t step, const RankFlags& own) {
  flags_[static_cast<size_t>(comm_->rank())] = own;
  const CollectiveInfo info{.phase = Phase::kStep, .unit = "hold", .step = step};
  return comm_->AllGatherHost(flags_.data(), sizeof(RankFlags), info);
}

}  // namespace zeroshard
