#include "shard_store/store_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "prometheus/text_serializer.h"
#include "tests/common/temp_folder.h"

namespace zeroshard::store {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Text(const StoreMetrics& metrics) {
  return prometheus::TextSerializer().Serialize(metrics.Collect());
}

TEST(StoreMetricsTest, EverySeriesIsThereFromTheStart) {
  const std::string text = Text(StoreMetrics([] { return StoreReadings(); }));
  for (const char* kind : {"master", "exp_avg", "exp_avg_sq", "parameters", "staging", "buffers"}) {
    EXPECT_THAT(text,
                HasSubstr(absl::StrCat("zeroshard_store_memory_bytes{kind=\"", kind, "\"} 0\n")));
  }
  for (const char* direction : {"push", "pull", "copy"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("zeroshard_store_traffic_bytes_total{direction=\"",
                                             direction, "\"} 0\n")));
  }
  for (const char* name : {"jobs", "chunks", "memory_limit_bytes", "memory_used_bytes",
                           "nvme_bytes", "nvme_limit_bytes"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("zeroshard_store_", name, " 0\n")));
  }
  for (const char* direction : {"read", "write"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("zeroshard_store_nvme_io_bytes_total{direction=\"",
                                             direction, "\"} 0\n")));
  }
  EXPECT_THAT(text, HasSubstr("zeroshard_store_nvme_errors_total 0\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_update_seconds_count 0\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_snapshot_seconds_count 0\n"));
}

TEST(StoreMetricsTest, ValuesAreThoseReadAndUpdatesAddUp) {
  StoreReadings now;
  now.usage.set_master_bytes(4);
  now.usage.set_exp_avg_bytes(5);
  now.usage.set_exp_avg_sq_bytes(6);
  now.usage.set_parameter_bytes(7);
  now.usage.set_staging_bytes(8);
  now.usage.set_nvme_bytes(9);
  now.usage.set_chunks(3);
  now.pushed = 100;
  now.pulled = 200;
  now.copied = 300;
  now.memory_limit = 1000;
  now.memory_used = 31;
  now.buffer_bytes = 11;
  now.nvme_limit = 2000;
  now.jobs = 2;
  now.disk_read = 12;
  now.disk_written = 13;
  now.disk_errors = 14;
  now.snapshot_seconds = {2};
  now.update_seconds = {0.5, 0.25};
  const StoreMetrics metrics([&] { return now; });
  EXPECT_THAT(Text(metrics), HasSubstr("zeroshard_store_update_seconds_sum 0.75\n"));
  now.update_seconds = {0.25};
  const std::string text = Text(metrics);
  EXPECT_THAT(text, HasSubstr("zeroshard_store_update_seconds_sum 1\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_update_seconds_count 3\n"));
  // A large job's, of minutes, are told apart too.
  now.update_seconds = {250};
  EXPECT_THAT(Text(metrics),
              AllOf(HasSubstr("zeroshard_store_update_seconds_bucket{le=\"100\"} 3\n"),
                    HasSubstr("zeroshard_store_update_seconds_bucket{le=\"300\"} 4\n")));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_memory_bytes{kind=\"exp_avg_sq\"} 6\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_memory_bytes{kind=\"staging\"} 8\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_memory_bytes{kind=\"buffers\"} 11\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_traffic_bytes_total{direction=\"push\"} 100\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_traffic_bytes_total{direction=\"pull\"} 200\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_memory_limit_bytes 1000\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_jobs 2\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_traffic_bytes_total{direction=\"copy\"} 300\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_memory_used_bytes 31\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_nvme_bytes 9\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_nvme_limit_bytes 2000\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_chunks 3\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_nvme_io_bytes_total{direction=\"read\"} 12\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_nvme_io_bytes_total{direction=\"write\"} 13\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_nvme_errors_total 14\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_store_snapshot_seconds_sum 4\n"));  // of two readings
}

TEST(StoreMetricsTest, PromtoolFindsNothingToSay) {
  if (std::system("promtool --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "no promtool here";
  const TempFolder folder;
  const std::string path = folder / "metrics.txt";
  std::ofstream(path) << Text(StoreMetrics([] { return StoreReadings(); }));
  EXPECT_EQ(std::system(
                absl::StrCat("promtool check metrics < ", path, " > ", path, ".lint 2>&1").c_str()),
            0);
}

}  // namespace
}  // namespace zeroshard::store
