#include "common/plan/capacity.h"

#include "common/plan/mesh.h"
#include "common/plan/model_shape.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

constexpr uint64_t kGB = 1'000'000'000;

Workload WorkOf(double parameters) {
  Workload work;
  const auto spec = ShapeOf(parameters, {});
  EXPECT_TRUE(spec.ok()) << spec.status();
  work.model = *MakeModelTable(*spec);
  work.options.dtype = DType::kBF16;
  work.fetch_one_ahead = true;
  return work;
}

ClusterSize ClusterOf(int devices, uint64_t device, uint64_t host, uint64_t nvme) {
  ClusterSize cluster;
  cluster.devices = devices;
  cluster.device_memory = device;
  cluster.host_memory = host;
  cluster.nvme = nvme;
  cluster.network = 50e9;
  cluster.device_link = 450e9;
  cluster.host_link = 50e9;
  cluster.memory_speed = 200e9;
  cluster.nvme_speed = 10e9;
  cluster.peak = 1e15;
  cluster.peak_share = 0.4;
  cluster.link_share = 0.8;
  return cluster;
}

double Count(const Workload& work) { return static_cast<double>(work.model.ParameterCount()); }

// 40 B on one GPU of 32 GB, as published for CPU offload: 16 bytes a parameter are 640 GB, and with
// optimizer and parameters in host memory all of them are there. On the GPU stay the embedding's
// gradient, what is gathered for a block and the next, three blocks' gradients on their way, and
// activations.
TEST(DocumentedCases, FortyBillionOnOneGpuWithStage3AndCpuOffload) {
  const Workload work = WorkOf(40e9);
  const ClusterSize cluster = ClusterOf(1, 32 * kGB, 1500 * kGB, 0);
  const auto found = SmallestThatFits(work, cluster, false);
  ASSERT_TRUE(found.has_value());
  const Configuration& c = found->configuration;
  EXPECT_EQ(c.Devices(), 1);
  EXPECT_EQ(c.stage, 3);
  EXPECT_EQ(c.offload, OffloadTo::kCpu);
  EXPECT_TRUE(c.offload_param);
  EXPECT_FALSE(c.checkpointing);
  EXPECT_NEAR(static_cast<double>(found->bytes.host), 16 * Count(work), 0.001 * 16 * Count(work));
  EXPECT_EQ(found->bytes.parameters, 0u);
  EXPECT_EQ(found->bytes.optimizer, 0u);
  // Two bytes an element of the embedding, and fp32 sums of as many rows as there are tokens.
  const double hidden = static_cast<double>(work.model.config.hidden);
  const double embedding = static_cast<double>(work.model.units[0].length);
  const double block = static_cast<double>(work.model.units[1].length);
  EXPECT_EQ(static_cast<double>(found->bytes.gradients), 2 * embedding + 1024 * hidden * 4);
  EXPECT_EQ(static_cast<double>(found->bytes.buffers), 2 * (2 * block + 3 * block));
  // Parameters pulled for forward and for backward; gradients pushed once.
  EXPECT_NEAR(static_cast<double>(found->push), 2 * Count(work), 0.001 * 2 * Count(work));
  EXPECT_NEAR(static_cast<double>(found->pull), 4 * Count(work), 0.02 * 4 * Count(work));
  // Where activations are computed again, 10 GB are enough, but not what a block alone needs.
  const auto least = SmallestThatFits(work, ClusterOf(1, 10 * kGB, 1500 * kGB, 0), false);
  ASSERT_TRUE(least.has_value());
  EXPECT_TRUE(least->configuration.checkpointing);
  const auto five_blocks = static_cast<uint64_t>(2 * 5 * block);
  EXPECT_FALSE(SmallestThatFits(work, ClusterOf(1, five_blocks, 1500 * kGB, 0), false).has_value());
  // Not without the host's memory.
  EXPECT_FALSE(SmallestThatFits(work, ClusterOf(1, 141 * kGB, 600 * kGB, 0), false).has_value());
}

// With accumulation the sums of a step are kept in fp32 until they are final.
TEST(DocumentedCases, FortyBillionWithAccumulationKeepsEveryGradient) {
  Workload work = WorkOf(40e9);
  work.accumulation = 2;
  Configuration c;
  c.stage = 3;
  c.offload = OffloadTo::kCpu;
  c.offload_param = c.checkpointing = true;
  const Evaluation e = Evaluate(work, ClusterOf(1, 141 * kGB, 1500 * kGB, 0), c);
  EXPECT_FALSE(e.Fits());
  EXPECT_NEAR(static_cast<double>(e.bytes.gradients), 4 * Count(work), 0.02 * 4 * Count(work));
}

// 175 B on 8 x 80 GB: 2.8 TB of state, where the GPUs have 0.64 and the host here 1; on NVMe it
// fits.
TEST(DocumentedCases, OneHundredSeventyFiveBillionOnEightGpusWithStage3AndNvme) {
  const Workload work = WorkOf(175e9);
  const ClusterSize cluster = ClusterOf(8, 80 * kGB, 1000 * kGB, 8000 * kGB);
  Configuration c;
  c.stage = 3;
  c.data = 8;
  EXPECT_FALSE(Evaluate(work, cluster, c).Fits());
  c.offload = OffloadTo::kCpu;
  EXPECT_FALSE(Evaluate(work, cluster, c).Fits());
  c.offload = OffloadTo::kNvme;
  c.checkpointing = true;
  const Evaluation e = Evaluate(work, cluster, c);
  EXPECT_TRUE(e.Fits());
  // Sixteen bytes a parameter, and a page to each 2^18 elements of a section.
  EXPECT_NEAR(static_cast<double>(e.bytes.nvme), 16 * Count(work), 0.01 * 16 * Count(work));
  EXPECT_LT(e.bytes.host, kGB);
  EXPECT_NEAR(static_cast<double>(e.bytes.parameters), 2 * Count(work) / 8,
              0.001 * 2 * Count(work) / 8);
  // With the parameters on NVMe too one of the GPUs is enough.
  const auto found = SmallestThatFits(work, cluster, false);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->configuration.Devices(), 1);
  EXPECT_EQ(found->configuration.stage, 3);
  EXPECT_EQ(found->configuration.offload, OffloadTo::kNvme);
  EXPECT_TRUE(found->configuration.offload_param);
  EXPECT_FALSE(SmallestThatFits(work, ClusterOf(8, 80 * kGB, 1000 * kGB, 0), false).has_value());
}

// 2 T on 512 GPUs: a block has 9.2 B parameters, 18 GB in 16 bits, so that two of them gathered and
// three gradients on their way are 92 GB: no stage of data parallelism alone fits 80 GB. Cut by
// tensor and pipeline it does.
TEST(DocumentedCases, TwoTrillionOn512GpusWithStage3AndThreeDimensions) {
  const Workload work = WorkOf(2e12);
  const double block = 12.0 * 27648 * 27648;
  EXPECT_GT(5 * 2 * block, 80e9);
  const ClusterSize cluster = ClusterOf(512, 80 * kGB, 1000 * kGB, 0);
  EXPECT_FALSE(SmallestThatFits(work, cluster, false).has_value());
  Configuration c;
  c.stage = 3;
  c.checkpointing = true;
  c.tensor = 8;
  c.pipeline = 8;
  c.data = 8;
  // On the GPUs alone: state / (t * p * d), gradients in fp32 as a pipeline adds up micro-batches.
  Evaluation alone = Evaluate(work, cluster, c);
  ASSERT_EQ(alone.impossible, "");
  const double state = (2 + 4 + 12) * Count(work) / 512;
  EXPECT_NEAR(
      static_cast<double>(alone.bytes.parameters + alone.bytes.gradients + alone.bytes.optimizer),
      state, 0.02 * state);
  EXPECT_TRUE(Evaluate(work, ClusterOf(512, 96 * kGB, 0, 0), c).Fits());
  ASSERT_EQ(alone.lacks.size(), 1u);
  EXPECT_EQ(alone.lacks[0].kind, "device memory");
  // With the optimizer in host memory on 80 GB too.
  c.offload = OffloadTo::kCpu;
  const Evaluation fits = Evaluate(work, cluster, c);
  EXPECT_TRUE(fits.Fits());
  EXPECT_NEAR(static_cast<double>(fits.bytes.host), 16 * Count(work) / 64,
              0.001 * 16 * Count(work) / 64);
  const auto found = SmallestThatFits(work, cluster, true);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->configuration.stage, 3) << Describe(found->configuration);
  EXPECT_GT(found->configuration.tensor, 1);
  EXPECT_GT(found->configuration.pipeline, 1);
}

// A mesh divides the state by t * p, and its data dimension is n / (t * p).
TEST(Mesh, StateIsThatOfTheFormula) {
  const Workload work = WorkOf(7.5e9);
  const auto layers = static_cast<double>(work.model.config.layers);
  for (const int tensor : {1, 2, 8}) {
    for (const int pipeline : {1, 2, 4}) {
      for (int stage = 0; stage <= 3; ++stage) {
        Configuration c;
        c.stage = stage;
        c.tensor = tensor;
        c.pipeline = pipeline;
        c.data = 64 / (tensor * pipeline);
        const Evaluation e = Evaluate(work, ClusterOf(64, 80 * kGB, 0, 0), c);
        ASSERT_EQ(e.impossible, "");
        const double cut = Count(work) / (tensor * pipeline);
        const double gradient = pipeline > 1 ? 4 : 2;  // several micro-batches are added up
        const double n = c.data;
        const double wanted = cut * (2 / (stage >= 3 ? n : 1) + gradient / (stage >= 2 ? n : 1) +
                                     12 / (stage >= 1 ? n : 1));
        const auto state =
            static_cast<double>(e.bytes.parameters + e.bytes.gradients + e.bytes.optimizer);
        // Embedding and head are counted whole in every stage of a pipeline (0.2 B of 7.5 B), and
        // of a tied table the head's gradient beside that of the rows. As the head costs as much as
        // a block, so does one block more than layers / p.
        EXPECT_GE(state, 0.999 * wanted) << Describe(c);
        const double block = pipeline > 1 ? pipeline / layers : 0;
        EXPECT_LE(state, wanted * (1 + 0.035 * pipeline + block)) << Describe(c);
      }
    }
  }
}

TEST(Mesh, WhatDoesNotDivideIsNamedWithTheNumbers) {
  v1::ModelSpec spec;
  spec.set_architecture("llama");
  spec.set_hidden_size(512);
  spec.set_layers(30);
  spec.set_heads(8);
  spec.set_kv_heads(2);
  spec.set_sequence_length(64);
  spec.set_vocab_size(1000);
  const auto model = MakeModelTable(spec);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(MeshProblem(*model, 1, 33), HasSubstr("33 x 1 stages for 32 units"));
  EXPECT_THAT(MeshProblem(*model, 3, 1), HasSubstr("8 heads (model.heads) on 3 tensor ranks"));
  EXPECT_EQ(MeshProblem(*model, 2, 3), "");
  // What does not divide evenly is done right instead: stages of 7 and 8 layers, and two ranks for
  // each of two key and value heads.
  EXPECT_EQ(MeshProblem(*model, 4, 4), "");
  EXPECT_EQ(SliceModel(*model, 4, 4, false).config.layers, 8);
  EXPECT_EQ(SliceModel(*model, 4, 4, false).config.kv_heads, 1);
}

TEST(Mesh, TheIdleShareIsThatOfTheFormulaAndMoreWhereStagesDiffer) {
  // A head of a vocabulary of two is next to nothing: four stages of three equal blocks.
  v1::ModelSpec spec;
  spec.set_architecture("gpt2");
  spec.set_hidden_size(512);
  spec.set_layers(12);
  spec.set_heads(8);
  spec.set_sequence_length(64);
  spec.set_vocab_size(2);
  const auto config = MakeModelConfig(spec);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(IdleShare(*config, 1, false, 8), 0);
  for (const bool checkpointing : {false, true}) {
    EXPECT_NEAR(IdleShare(*config, 4, checkpointing, 1), 3.0, 1e-3);
    EXPECT_NEAR(IdleShare(*config, 4, checkpointing, 8), 3.0 / 8, 1e-3);
    EXPECT_NEAR(IdleShare(*config, 4, checkpointing, 1000000), 3e-6, 1e-3);
  }
  // Five stages of 2, 2, 2, 3 and 3 blocks: the first micro-batch passes the other four stages, 9
  // blocks, while the busiest of 3 waits.
  EXPECT_NEAR(IdleShare(*config, 5, false, 1), 9.0 / 3, 1e-3);
}

// Two all-reduces of 2 * 64 * 512 elements a block and pass, as a ring on 4 ranks 3/2 of the bytes.
TEST(Mesh, TensorAndPipelineTrafficAreCounted) {
  Workload work;
  v1::ModelSpec spec;
  spec.set_architecture("gpt2");
  spec.set_hidden_size(512);
  spec.set_layers(4);
  spec.set_heads(8);
  spec.set_sequence_length(64);
  spec.set_vocab_size(1024);
  work.model = *MakeModelTable(spec);
  work.options.dtype = DType::kBF16;
  work.options.micro_batch = 2;
  Configuration c;
  c.tensor = 4;
  c.pipeline = 2;
  const uint64_t boundary = 2 * 64 * 512 * 2;
  // Two micro-batches (a pipeline of two needs them), two blocks a stage.
  Evaluation e = Evaluate(work, ClusterOf(8, 80 * kGB, 0, 0), c);
  EXPECT_EQ(e.accumulation, 2);
  EXPECT_EQ(e.traffic[2][0], 2 * 2 * 2 * boundary * 3 / 2);
  EXPECT_EQ(e.traffic[2][1], e.traffic[2][0]);
  EXPECT_EQ(e.traffic[4][0], 2 * boundary);
  EXPECT_EQ(e.traffic[4][1], 2 * boundary);
  c.checkpointing = true;
  e = Evaluate(work, ClusterOf(8, 80 * kGB, 0, 0), c);
  // The second sum of a block that is computed again is of no use.
  EXPECT_EQ(2 * e.traffic[2][1], 3 * e.traffic[2][0]);
}

// The bytes are those of the planner of jobs, whose numbers a run has.
TEST(Evaluate, OfDataParallelRanksIsTheJobsPlan) {
  Workload work = WorkOf(124e6);
  for (int stage = 0; stage <= 3; ++stage) {
    Configuration c;
    c.stage = stage;
    c.data = 3;
    const Evaluation e = Evaluate(work, ClusterOf(3, 80 * kGB, 0, 0), c);
    ZeroOptions options = work.options;
    options.stage = stage;
    options.world = 3;
    options.micro_batches = 3;
    options.persistence_threshold = options.max_reuse_distance = 0;
    const RankPlan plan = PlanRank(work.model, MakeZeroPolicy(work.model, options), 0);
    EXPECT_EQ(e.bytes.parameters, plan.parameters);
    EXPECT_EQ(e.bytes.gradients, plan.gradients);
    EXPECT_EQ(e.bytes.optimizer, plan.optimizer);
    EXPECT_EQ(e.bytes.activations, plan.activations);
    EXPECT_EQ(e.traffic, plan.step);
    EXPECT_EQ(e.Moved(), plan.StepBytes());
  }
}

// 1 GB/s everywhere and no overlap: seconds are gigabytes.
TEST(StepTime, IsTheSumOfItsPartsUnderTheAssumptions) {
  Workload work = WorkOf(124e6);
  ClusterSize cluster = ClusterOf(4, 80 * kGB, 80 * kGB, 0);
  cluster.device_link = cluster.host_link = cluster.memory_speed = 1e9;
  cluster.link_share = 1;
  cluster.peak = 1e12;
  cluster.peak_share = 0.5;
  Configuration c;
  c.stage = 1;
  c.data = 4;
  c.offload = OffloadTo::kCpu;
  work.options.overlap = false;
  const Evaluation e = Evaluate(work, cluster, c);
  const double tokens = 1024;
  EXPECT_EQ(e.time.tokens, 4 * tokens);
  EXPECT_DOUBLE_EQ(e.time.compute, 3 * tokens * ForwardOperations(work.model.config) / 0.5e12);
  EXPECT_DOUBLE_EQ(e.time.exposed, static_cast<double>(e.Moved()) / 1e9);
  EXPECT_DOUBLE_EQ(e.time.update, Count(work) * 28 / 1e9);
  EXPECT_DOUBLE_EQ(e.time.total, e.time.compute + e.time.exposed + e.time.update);
  // With overlap what moves during the passes hides behind the longer of the two.
  work.options.overlap = true;
  const Evaluation hidden = Evaluate(work, cluster, c);
  EXPECT_GT(hidden.time.hidden, 0);
  EXPECT_DOUBLE_EQ(hidden.time.total, std::max(hidden.time.compute, hidden.time.hidden) +
                                          hidden.time.exposed + hidden.time.update);
  EXPECT_LT(hidden.time.total, e.time.total);
}

// 6 operations a parameter and token for both passes (Kaplan et al. 2020, section 2.1), where
// attention over the sequence is small.
TEST(ForwardOperationsTest, AreTwoAParameterAndAttention) {
  const Workload work = WorkOf(175e9);
  const double operations = ForwardOperations(work.model.config);
  EXPECT_NEAR(operations, 2 * Count(work), 0.02 * 2 * Count(work));
}

TEST(SmallestThatFits, PrefersFewerDevicesThenLessTraffic) {
  const Workload work = WorkOf(1.5e9);  // 24 GB of state
  const auto one = SmallestThatFits(work, ClusterOf(8, 80 * kGB, 0, 0), true);
  ASSERT_TRUE(one.has_value());
  EXPECT_EQ(one->configuration.Devices(), 1);
  EXPECT_EQ(one->configuration.stage, 0);
  EXPECT_FALSE(one->configuration.checkpointing);
  EXPECT_EQ(one->Moved(), 0u);
  // 16 GB each: not one of them.
  const auto more = SmallestThatFits(work, ClusterOf(8, 16 * kGB, 0, 0), false);
  ASSERT_TRUE(more.has_value());
  EXPECT_GT(more->configuration.Devices(), 1);
  for (const Configuration& c :
       Configurations(ClusterOf(8, 16 * kGB, 0, 0), more->configuration.Devices(), false)) {
    const Evaluation other = Evaluate(work, ClusterOf(8, 16 * kGB, 0, 0), c);
    if (other.Fits()) {
      EXPECT_FALSE(Smaller(other, *more)) << Describe(c);
    }
  }
  EXPECT_FALSE(SmallestThatFits(work, ClusterOf(4, 1 * kGB, 0, 0), true).has_value());
}

TEST(SmallestThatFits, AFixedBatchIsNotSplitFurtherThanItsMicroBatches) {
  Workload work = WorkOf(1.5e9);
  work.micro_batches = 2;
  Configuration c;
  c.data = 4;
  EXPECT_THAT(Evaluate(work, ClusterOf(4, 80 * kGB, 0, 0), c).impossible,
              HasSubstr("2 micro-batches a step on 4"));
  c.data = 1;
  c.pipeline = static_cast<int>(work.model.config.layers);
  EXPECT_THAT(Evaluate(work, ClusterOf(4, 80 * kGB, 0, 0), c).impossible,
              HasSubstr("2 micro-batches a rank in"));
}

TEST(TransientBytesTest, CountsWhatIsGatheredAtOnceAndGradientsOnTheirWay) {
  const Workload work = WorkOf(124e6);
  ZeroOptions options = work.options;
  options.stage = 3;
  options.world = options.micro_batches = 4;
  options.persistence_threshold = options.max_reuse_distance = options.prefetch_bucket = 0;
  const auto block = static_cast<uint64_t>(work.model.units[1].length);
  const auto table = static_cast<uint64_t>(work.model.units[0].length);
  const auto head = static_cast<uint64_t>(work.model.units.back().length);
  // The head's use is the widest: its norm and the tied table.
  EXPECT_EQ(TransientBytes(work.model, MakeZeroPolicy(work.model, options)),
            2 * (std::max(block, table + head) + 3 * block));
  options.prefetch_bucket = work.model.units[1].length;
  EXPECT_EQ(TransientBytes(work.model, MakeZeroPolicy(work.model, options)),
            2 * (table + head + block + 3 * block));
  options.stage = 1;  // reduced in place, nothing gathered
  EXPECT_EQ(TransientBytes(work.model, MakeZeroPolicy(work.model, options)), 0u);
}

}  // namespace
}  // namespace zeroshard
