// Bulk streams that speak with a StoreHost.
#pragma once

#include "shard_store/service/bulk_session.h"
#include "shard_store/state/store_host.h"

namespace zeroshard::store {

// `host` outlives every session and what it calls.
OpenSession SessionsOf(StoreHost* host);

}  // namespace zeroshard::store
