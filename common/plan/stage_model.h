// What one rank of a pipeline holds of a model, what its ZeRO engine does in a step, and the memory
// for what is on its way. Pure arithmetic; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "common/plan/model_table.h"
#include "common/plan/pipeline_schedule.h"
#include "common/plan/pipeline_stages.h"
#include "common/plan/zero_policy.h"

namespace zeroshard {

// A rank's units are in their places of the whole model, and those of other ranks are empty there:
// no parameters, length 0. So whatever is keyed by unit (dropout, rounding, digests) has the same
// keys on every rank and without a pipeline, and a layout does not depend on the pipeline.
//
// Where the embedding is tied to the head and they are on different ranks, the last one has a copy
// of the token table: its unit 0 has that tensor alone, where the embedding has it, and nothing
// where gpt2's positions are. The first rank's is the one that is counted, saved and digested.
struct StageModel {
  ModelTable model;
  PipelineStages stages;
  int rank = 0;        // in the pipeline line
  bool copy = false;   // unit 0 is the copy
  int tied_peer = -1;  // who else has the token table; -1: nobody
  bool HasEmbedding() const { return rank == 0; }
  bool HasHead() const { return rank == stages.pipeline - 1; }
  // Of the model's units those that run here; the copy does not.
  bool Runs(int unit) const { return stages.RankOf(stages.StageOf(unit)) == rank; }
};

// `stages` are of `model` (CutStages). `rank` below stages.pipeline.
StageModel MakeStageModel(const ModelTable& model, const PipelineStages& stages, int rank);

// `options` as for a job without pipeline whose ranks are those of one data line: world and
// micro_batches are of that line and of the whole step. `schedule`: this rank's, of as many
// micro-batches as the policy has rounds.
//
// Its uses are those of a whole step, in the schedule's order, so that stage 3 keeps a unit from
// one use to the next, also from one micro-batch to the next, as far as max_reuse_distance and
// max_live say: with large ones it is gathered once a step, with no room for every forward and
// backward. The head's forward belongs to its backward, as without pipeline. There are no
// eval_uses: EvaluationUses.
ZeroPolicy MakeStagePolicy(const StageModel& stage, const ZeroOptions& options,
                           const RankSchedule& schedule);
// The uses of micro-batches that are only measured, all at once, in the order of `schedule`
// (MakeForwardSchedule, this rank's).
std::vector<UnitUse> EvaluationUses(const StageModel& stage, const ZeroPolicy& policy,
                                    const RankSchedule& schedule);
// Micro-batches of a data-parallel rank and step: ceil(G / N).
int64_t RoundsOf(const ZeroOptions& options);

// Elements [StreamRows, C] (activation_table.h) between two units, and their bytes rounded up
// to 64.
int64_t BoundaryElements(const ModelConfig& config, const ZeroOptions& options);
int64_t BoundaryBytes(const ModelConfig& config, const ZeroOptions& options);
// Buffers for outputs that leave: a compute overlaps with the sending of the one before.
int OutputSlots(const PipelineShape& shape);
// What a rank's activations take, transfers included: of each virtual stage MostAlive micro-batches
// of what its units keep, InputSlots and GradientSlots; then OutputSlots, one scratch block and the
// two buffers that carry the gradient from unit to unit.
int64_t StageActivationBytes(const StageModel& stage, const ZeroOptions& options,
                             const RankSchedule& schedule);
// How many micro-batches are open at once at most, from a rank's first compute of one to its last:
// what is read for micro-batch i may be kept in place i mod that number.
int64_t OpenMicroBatches(const RankSchedule& schedule);

}  // namespace zeroshard
