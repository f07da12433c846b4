// Reads chunks of a job from another store, over a Bulk stream of its own.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shard_store/state/store_host.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::store {

// Waits until the peer has welcomed this store; while it answers UNAVAILABLE it is asked again.
// DEADLINE_EXCEEDED after `timeout`, which bounds each silence of a Read too; others as the peer
// gave them. Each names the peer. The reader is thread-safe; its reads take turns.
absl::StatusOr<std::unique_ptr<PeerReader>> ConnectPeer(const v1::StoreMap::Store& peer,
                                                        const v1::BulkHello& hello,
                                                        absl::Duration timeout);

}  // namespace zeroshard::store
