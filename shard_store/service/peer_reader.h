// Reads chunks of a job from another store, over a Bulk stream of its own.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shard_store/state/store_host.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::store {

// Begins one attempt to connect and returns at once; it is the first Read that waits for the peer's
// welcome. Errors of Read: DEADLINE_EXCEEDED after a silence of `timeout`, CANCELLED after Cancel,
// UNAVAILABLE where the peer cannot be reached, others as the peer gave them; each names the peer.
// After any of them the reader is of no further use. Thread-safe; reads take turns.
absl::StatusOr<std::unique_ptr<PeerReader>> ConnectPeer(const v1::StoreMap::Store& peer,
                                                        const v1::BulkHello& hello,
                                                        absl::Duration timeout);

}  // namespace zeroshard::store
