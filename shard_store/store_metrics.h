// The store's metrics.
#pragma once

#include "prometheus/registry.h"

namespace zeroshard {

// Adds zeroshard_store_memory_bytes{kind}, one series a kind, all 0: a store of this version holds
// nothing.
void AddStoreMetrics(prometheus::Registry* registry);

}  // namespace zeroshard
