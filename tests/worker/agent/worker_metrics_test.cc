#include "worker/agent/worker_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "prometheus/text_serializer.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Text(const WorkerMetrics& metrics) {
  return prometheus::TextSerializer().Serialize(metrics.Collect());
}

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(WorkerMetricsTest, EverySeriesIsThereFromTheStartAtZero) {
  WorkerMetrics metrics;
  const std::atomic<uint64_t> barrier{0};
  metrics.Begin("licences", 1, 3, &barrier);
  const std::string text = Text(metrics);
  const std::string labels = "{job=\"licences\",rank=\"1\",stage=\"3\"";
  for (const char* series :
       {",kind=\"parameters\"}", ",kind=\"gradients\"}", ",kind=\"optimizer\"}",
        ",kind=\"activations\"}", ",kind=\"buffers\"}"}) {
    EXPECT_THAT(text, HasSubstr("zeroshard_worker_memory_bytes" + labels + series + " 0\n"));
  }
  for (const char* op : {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "send"}) {
    for (const char* phase : {"forward", "backward", "step"}) {
      EXPECT_THAT(text, HasSubstr("zeroshard_worker_collective_bytes_total" + labels + ",op=\"" +
                                  op + "\",phase=\"" + phase + "\"} 0\n"));
    }
  }
  for (const char* phase :
       {"data", "forward", "backward", "communication", "offload", "optimizer", "barrier"}) {
    EXPECT_THAT(text, HasSubstr("zeroshard_worker_phase_seconds_total" + labels + ",phase=\"" +
                                phase + "\"} 0\n"));
  }
  for (const char* direction : {"push", "pull"}) {
    EXPECT_THAT(text, HasSubstr("zeroshard_worker_offload_bytes_total" + labels + ",direction=\"" +
                                direction + "\"} 0\n"));
    EXPECT_THAT(text, HasSubstr("zeroshard_worker_offload_shared_bytes_total" + labels +
                                ",direction=\"" + direction + "\"} 0\n"));
  }
  EXPECT_THAT(text, HasSubstr("zeroshard_worker_tokens_total" + labels + "} 0\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_worker_steps_total" + labels + "} 0\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_worker_pipeline_wait_seconds_total" + labels + "} 0\n"));
  for (const char* kind : {"predicted", "counted", "measured"}) {
    EXPECT_THAT(text, HasSubstr("zeroshard_worker_pipeline_bubble_ratio" + labels + ",kind=\"" +
                                kind + "\"} 0\n"));
  }
  EXPECT_EQ(Count(text, labels), 5u + 15u + 2u + 2u + 7u + 1u + 1u + 1u + 3u);
  EXPECT_EQ(Count(text, "# HELP"), 9u);
  EXPECT_EQ(Count(text, " counter\n"), 7u);
  EXPECT_EQ(Count(text, " gauge\n"), 2u);
}

TEST(WorkerMetricsTest, StepsCountFromZeroInEachJob) {
  WorkerMetrics metrics;
  const std::atomic<uint64_t> barrier{0};
  metrics.Begin("a", 0, 1, &barrier);
  metrics.CountStep();
  metrics.CountStep();
  EXPECT_THAT(Text(metrics),
              HasSubstr("zeroshard_worker_steps_total{job=\"a\",rank=\"0\",stage=\"1\"} 2\n"));
  metrics.End();
  metrics.Begin("b", 0, 1, &barrier);
  EXPECT_THAT(Text(metrics),
              HasSubstr("zeroshard_worker_steps_total{job=\"b\",rank=\"0\",stage=\"1\"} 0\n"));
  metrics.End();
}

TEST(WorkerMetricsTest, WhatTheDeviceHasIsThereWithoutAJob) {
  WorkerMetrics metrics;
  EXPECT_TRUE(metrics.Collect().empty());
  metrics.SetDeviceMemory(1 << 30);
  EXPECT_THAT(Text(metrics), HasSubstr("\nzeroshard_worker_device_memory_bytes 1073741824\n"));
}

TEST(WorkerMetricsTest, ValuesComeFromTheJobsCounters) {
  WorkerMetrics metrics;
  const std::atomic<uint64_t> barrier{500'000'000};
  metrics.Begin("a", 0, 2, &barrier);
  TrafficCounters traffic;
  traffic
      .bytes[static_cast<int>(CollectiveOp::kReduceScatter)][static_cast<int>(Phase::kBackward)] =
      123;
  TrainCounters train;
  train.tokens = 4096;
  train.phase_nanoseconds[static_cast<int>(StepPhase::kForward)] = 1'500'000'000;
  train.phase_nanoseconds[static_cast<int>(StepPhase::kBarrier)] = 250'000'000;
  metrics.SetTraffic({&traffic});
  metrics.SetTrain(&train);
  const std::string text = Text(metrics);
  EXPECT_THAT(text, HasSubstr("op=\"reduce_scatter\",phase=\"backward\"} 123\n"));
  EXPECT_THAT(text, HasSubstr("zeroshard_worker_tokens_total{job=\"a\",rank=\"0\",stage=\"2\"} "
                              "4096\n"));
  EXPECT_THAT(text, HasSubstr("phase=\"forward\"} 1.5\n"));
  EXPECT_THAT(text, HasSubstr("phase=\"barrier\"} 0.75\n"));
}

TEST(WorkerMetricsTest, TrafficIsOfAllLinesOfAMesh) {
  WorkerMetrics metrics;
  const std::atomic<uint64_t> barrier{0};
  metrics.Begin("a", 0, 2, &barrier);
  TrafficCounters data, pipeline, tensor;
  const auto at = [](TrafficCounters& of, CollectiveOp op) -> std::atomic<uint64_t>& {
    return of.bytes[static_cast<int>(op)][static_cast<int>(Phase::kForward)];
  };
  at(data, CollectiveOp::kAllReduce) = 100;
  at(tensor, CollectiveOp::kAllReduce) = 23;
  at(pipeline, CollectiveOp::kSend) = 7;
  metrics.SetTraffic({&data, &pipeline, &tensor});
  EXPECT_THAT(Text(metrics), HasSubstr("op=\"all_reduce\",phase=\"forward\"} 123\n"));
  EXPECT_THAT(Text(metrics), HasSubstr("op=\"send\",phase=\"forward\"} 7\n"));
  metrics.End();
  metrics.Begin("b", 0, 2, &barrier);
  EXPECT_THAT(Text(metrics), HasSubstr("op=\"send\",phase=\"forward\"} 0\n"));
}

TEST(WorkerMetricsTest, APipelinesBubbleIsPredictedCountedAndMeasured) {
  WorkerMetrics metrics;
  const std::atomic<uint64_t> barrier{0};
  metrics.Begin("a", 1, 2, &barrier);
  TrainCounters train;
  train.phase_nanoseconds[static_cast<int>(StepPhase::kForward)] = 2'000'000'000;
  train.phase_nanoseconds[static_cast<int>(StepPhase::kCommunication)] = 2'000'000'000;
  train.pipeline_wait_nanoseconds = 1'000'000'000;
  metrics.SetTrain(&train, {.predicted = 0.125, .counted = 0.5});
  const std::string text = Text(metrics);
  const std::string labels = "{job=\"a\",rank=\"1\",stage=\"2\"";
  EXPECT_THAT(text, HasSubstr("zeroshard_worker_pipeline_wait_seconds_total" + labels + "} 1\n"));
  const std::string ratio = "zeroshard_worker_pipeline_bubble_ratio" + labels + ",kind=";
  EXPECT_THAT(text, HasSubstr(ratio + "\"predicted\"} 0.125\n"));
  EXPECT_THAT(text, HasSubstr(ratio + "\"counted\"} 0.5\n"));
  EXPECT_THAT(text, HasSubstr(ratio + "\"measured\"} 0.25\n"));
}

TEST(WorkerMetricsTest, ManyShortJobsLeaveNoSeriesBehind) {
  WorkerMetrics metrics;
  const std::atomic<uint64_t> barrier{0};
  for (int i = 0; i < 200; ++i) {
    metrics.Begin("job" + std::to_string(i), 0, 0, &barrier);
    metrics.End();
  }
  EXPECT_EQ(Text(metrics), "");
  metrics.Begin("last", 0, 0, &barrier);
  EXPECT_THAT(Text(metrics), Not(HasSubstr("job199")));
}

}  // namespace
}  // namespace zeroshard
