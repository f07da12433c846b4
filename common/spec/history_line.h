// The format of history.jsonl, which the coordinator writes and the client prints.
#pragma once

#include <string>

#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard {

// One JSON object on one line, without the newline, the same keys in the same order:
//   {"step":1,"loss":5.545,"grad_norm":2.5,"learning_rate":5e-05,"tokens":4096,"seconds":0.25}
// with "eval_loss" before "seconds" at the steps after which the validation set was measured, and
// "steps_lost" there at the first step after the job went back to an earlier one: how many
// committed steps were given up since the record before. They are done again, so that each step is
// in the file once; those of a run add up to its JobStatus.steps_lost, once a step was done after
// the last. Only of a run that had lost some under a coordinator whose log had schema 3, which told
// of none, and that completed a checkpoint under a later one before the next roll-back, those are
// missing: nobody knows any more at which step they were due. A line of an fp16 job has
// "loss_scale" after "tokens", and then "skipped":true where a value was not finite and nothing was
// updated. Numbers in the shortest form that reads back as the same double; a non-finite one is
// null, of the loss or the norm of a skipped step. Two runs that trained the same print the same
// text, but for `seconds` and `steps_lost`.
std::string FormatHistoryLine(const v1::StepRecord& record);

}  // namespace zeroshard
