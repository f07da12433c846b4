#include "common/process_metrics.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

std::map<std::string, double> Values(const ProcessMetrics& metrics) {
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : metrics.Collect()) {
    EXPECT_EQ(family.metric.size(), 1u) << family.name;
    const bool counter = family.type == prometheus::MetricType::Counter;
    values[family.name] =
        counter ? family.metric.at(0).counter.value : family.metric.at(0).gauge.value;
  }
  return values;
}

TEST(ProcessMetricsTest, AreThoseThatTheSystemTellsThisProcessElsewhere) {
  const ProcessMetrics metrics;
  std::map<std::string, double> first = Values(metrics);
  ASSERT_EQ(first.size(), 6u);

  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  EXPECT_EQ(first["process_max_fds"], static_cast<double>(files.rlim_cur));
  rusage usage{};
  ASSERT_EQ(getrusage(RUSAGE_SELF, &usage), 0);
  EXPECT_NEAR(first["process_cpu_seconds_total"],
              static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                  1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec),
              1.0);
  EXPECT_LE(first["process_resident_memory_bytes"],
            1024.0 * static_cast<double>(usage.ru_maxrss) + (16 << 20));
  EXPECT_GT(first["process_resident_memory_bytes"], 1 << 20);
  EXPECT_GE(first["process_virtual_memory_bytes"], first["process_resident_memory_bytes"]);
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  EXPECT_LE(first["process_start_time_seconds"], now + 1);
  EXPECT_GT(first["process_start_time_seconds"], now - 3600);

  const int fd = dup(STDERR_FILENO);
  EXPECT_EQ(Values(metrics)["process_open_fds"], first["process_open_fds"] + 1);
  close(fd);
}

// procfs of another machine: 250 ticks of CPU, 3 pages, started 5 s after boot.
TEST(ProcessMetricsTest, ANameWithParenthesesAndSpacesShiftsNoField) {
  const TempFolder folder;
  std::filesystem::create_directories(folder / "self/fd");
  for (const char* name : {"0", "1", "2"}) std::ofstream(folder / "self/fd/" + name);
  const long ticks = sysconf(_SC_CLK_TCK);
  std::ofstream(folder / "self/stat")
      << "42 (a) b (c) S 1 1 1 0 -1 4194560 1 0 0 0 " << 2 * ticks << " " << ticks / 2
      << " 0 0 20 0 1 0 " << 5 * ticks << " 8192000 3 18446744073709551615 1 1 0\n";
  std::ofstream(folder / "self/limits")
      << "Limit                     Soft Limit           Hard Limit           Units     \n"
         "Max open files            unlimited            unlimited            files     \n";
  std::ofstream(folder / "stat") << "cpu  1 2 3\nbtime 1700000000\nprocesses 1\n";
  std::map<std::string, double> values = Values(ProcessMetrics(folder.path()));
  EXPECT_EQ(values["process_cpu_seconds_total"], 2.5);
  EXPECT_EQ(values["process_resident_memory_bytes"],
            3.0 * static_cast<double>(sysconf(_SC_PAGESIZE)));
  EXPECT_EQ(values["process_virtual_memory_bytes"], 8192000);
  EXPECT_EQ(values["process_start_time_seconds"], 1700000005);
  EXPECT_EQ(values["process_open_fds"], 3);
  EXPECT_FALSE(values.contains("process_max_fds"));  // there is no such number
}

TEST(ProcessMetricsTest, WhatCannotBeReadIsLeftOut) {
  const TempFolder folder;
  EXPECT_TRUE(ProcessMetrics(folder.path()).Collect().empty());
}

}  // namespace
}  // namespace zeroshard
