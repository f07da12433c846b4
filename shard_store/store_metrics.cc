#include "shard_store/store_metrics.h"

#include "prometheus/gauge.h"

namespace zeroshard {

void AddStoreMetrics(prometheus::Registry* registry) {
  auto& family = prometheus::BuildGauge()
                     .Name("zeroshard_store_memory_bytes")
                     .Help("Bytes of training state that this store holds in memory, by kind.")
                     .Register(*registry);
  for (const char* kind : {"master", "exp_avg", "exp_avg_sq", "parameters", "staging"}) {
    family.Add({{"kind", kind}}).Set(0);
  }
}

}  // namespace zeroshard
