// About how long a step takes: from counted bytes and operations, and from speeds that are said. It
// is an estimate to compare configurations by, under these assumptions (which `zeroshard plan`
// prints): products reach peak_share of the peak and every link link_share of its speed;
// communication of forward and backward and between stages hides behind them where overlap_comm is
// on, that of the end of a step and of tensor parallelism does not; ranks form rings, of which a
// host's network serves all that pass it; a pipeline's stages take as long as their units' declared
// operations; the stores' update reads and writes 28 bytes a parameter.
#pragma once

#include "common/plan/capacity.h"

namespace zeroshard {

// Fills time and the bubbles of a configuration whose bytes are counted. `cut`: its model.
void EstimateStep(const Workload& workload, const ClusterSize& cluster, const CutModel& cut,
                  const ZeroOptions& options, Evaluation* of);

}  // namespace zeroshard
