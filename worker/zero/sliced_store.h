// The shard stores for a tensor rank: their chunks are of the whole model's units, and the rank's
// ranges are of its slice's.
#pragma once

#include <memory>

#include "common/plan/tensor_slices.h"
#include "common/types.h"
#include "worker/zero/state_store.h"

namespace zeroshard {

// Over `inner`, which knows whole units; the caller's ranges are of slice.model, anywhere within
// its units. `type` is that of gradients on the wire and of parameters. Of one rank, which holds
// everything, it is `inner` itself.
//
// A push sends what the rank is home of, and zeros for the padding behind a tensor that ends in it,
// so that the pushes of all ranks of a tensor group cover each element exactly once
// (tensor_slices.h); of the rest nothing leaves, and a push of nothing is done when `after` is. A
// pull brings all that the rank holds, copies too, and zeros where it has no tensor: between
// tensors, in rows behind the vocabulary's end.
//
// The contract is state_store.h's, its counters `inner`'s; INVALID_ARGUMENT for a range that is not
// the slice's. Memory must be the host's: MakeStagedStore goes around this, not into it.
std::unique_ptr<StateStore> MakeSlicedStore(std::unique_ptr<StateStore> inner, TensorRank slice,
                                            DType type);

}  // namespace zeroshard
