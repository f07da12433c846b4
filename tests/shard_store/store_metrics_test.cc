#include "shard_store/store_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "prometheus/text_serializer.h"

namespace zeroshard {
namespace {

TEST(StoreMetricsTest, MemoryIsThereByKindAtZero) {
  prometheus::Registry registry;
  AddStoreMetrics(&registry);
  const std::string text = prometheus::TextSerializer().Serialize(registry.Collect());
  for (const char* kind : {"master", "exp_avg", "exp_avg_sq", "parameters", "staging"}) {
    EXPECT_THAT(text, testing::HasSubstr(std::string("zeroshard_store_memory_bytes{kind=\"") +
                                         kind + "\"} 0\n"));
  }
}

}  // namespace
}  // namespace zeroshard
