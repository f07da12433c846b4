// The shard stores for an engine whose memory the host cannot reach: gradients and parameters pass
// through pinned host memory.
#pragma once

#include <cstddef>
#include <memory>

#include "common/plan/model_table.h"
#include "common/types.h"
#include "worker/device/device.h"
#include "worker/zero/state_store.h"

namespace zeroshard {

// What a rank of `world` needs of it at most, in bytes: in each direction what the job lets be on
// its way (`most_pushed`, `most_pulled`, in elements), but never more than the rank owns of the
// model: that much it pushes and, where it keeps it, pulls in a step.
size_t StagedBytes(const ModelTable& model, int world, int rank, DType type, int64_t most_pushed,
                   int64_t most_pulled);

// Over `inner`, which sees host memory alone; `type` is that of gradients on the wire and of
// parameters. A push copies to host memory after `after` and then pushes; a pull runs at once, and
// what it brought is copied to `out` after `after`. The contract is state_store.h's; besides, an
// event has the error of a copy that failed, and RESOURCE_EXHAUSTED where the host has no memory,
// which aborts `inner`.
// Host memory in use and kept stays within `host_bytes`; a call that does not fit waits for the
// oldest, and one that is larger alone takes a buffer of its own. So no pull may wait for a version
// that its caller commits only after its next call.
// The destructor ends what is pending as the inner one's does, and waits for the copies.
std::unique_ptr<StateStore> MakeStagedStore(std::unique_ptr<StateStore> inner, Device* device,
                                            DType type, size_t host_bytes);

}  // namespace zeroshard
