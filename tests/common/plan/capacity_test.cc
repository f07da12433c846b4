#include "common/plan/capacity.h"

#include <cmath>

#include "common/plan/activation_table.h"
#include "common/plan/mesh.h"
#include "common/plan/model_shape.h"
#include "common/plan/tensor_slices.h"
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
  // Gathered: the embedding, whose buffer is the head's again, the head's norm, two blocks. Then
  // three blocks' gradients, the positions', and of the head matrix three ranges of 2^22 elements,
  // for which a block's buffer is too large; of 1024 tokens the rows with their ids, the rank's own
  // and all ranks'.
  const double norm = static_cast<double>(work.model.units.back().length);
  const double range = std::floor(4194304 / hidden / 64) * 64 * hidden;
  const double rows = 2 * 1024 * (4 + 2 * hidden);
  EXPECT_NEAR(static_cast<double>(found->bytes.buffers),
              2 * (embedding + norm + 2 * block + 3 * block + 3 * range + 1024 * hidden) + rows,
              0.01 * 2 * block);
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
        double state = 0;
        for (const PositionPlan& at : e.positions) {
          state = std::max(state, static_cast<double>(at.bytes.parameters + at.bytes.gradients +
                                                      at.bytes.optimizer));
        }
        // The rank that has most: one block more than layers / p, as the head costs what a block
        // does; the embedding or the copy of its table; and of a tied table the head's gradient
        // beside that of the rows.
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
  EXPECT_THAT(MeshProblem(*model, {.pipeline = 33}), HasSubstr("33 x 1 stages for 32 units"));
  EXPECT_THAT(MeshProblem(*model, {.tensor = 3}),
              HasSubstr("8 heads (model.heads) on 3 tensor ranks"));
  EXPECT_THAT(MeshProblem(*model, {.tensor = 8, .sequence_parallel = true}), "");
  EXPECT_EQ(MeshProblem(*model, {.tensor = 2, .pipeline = 3}), "");
  // What does not divide evenly is done right instead: stages of 7 and 8 layers, and two ranks for
  // each of two key and value heads.
  EXPECT_EQ(MeshProblem(*model, {.tensor = 4, .pipeline = 4}), "");
  const CutModel cut(&*model, {.tensor = 4, .pipeline = 4}, false);
  int blocks = 0;
  for (int rank = 0; rank < 4; ++rank) {
    int of_rank = 0;
    for (const UnitTable& unit : cut.Part(rank).model.units)
      of_rank += unit.kind == UnitKind::kBlock && unit.length > 0;
    EXPECT_TRUE(of_rank == 7 || of_rank == 8) << of_rank;
    blocks += of_rank;
  }
  EXPECT_EQ(blocks, 30);
  EXPECT_EQ(cut.Part(1).model.config.kv_heads, 1);
  EXPECT_EQ(cut.Share(3).copies, 2);
}

Workload SmallGpt2(uint32_t layers, uint32_t vocab) {
  Workload work;
  v1::ModelSpec spec;
  spec.set_architecture("gpt2");
  spec.set_hidden_size(512);
  spec.set_layers(layers);
  spec.set_heads(8);
  spec.set_sequence_length(64);
  spec.set_vocab_size(vocab);
  work.model = *MakeModelTable(spec);
  work.options.dtype = DType::kBF16;
  return work;
}

// A head of a vocabulary of two is next to nothing: four stages of three equal blocks.
TEST(Mesh, TheBubbleIsThatOfTheFormulaAndMoreWhereStagesDiffer) {
  Workload work = SmallGpt2(12, 2);
  const auto idle = [&](int pipeline, int64_t micro_batches) {
    work.micro_batches = micro_batches;
    Configuration c;
    c.pipeline = pipeline;
    const Evaluation e = Evaluate(work, ClusterOf(8, 80 * kGB, 0, 0), c);
    EXPECT_EQ(e.impossible, "");
    EXPECT_DOUBLE_EQ(e.predicted_bubble,
                     (pipeline - 1.0) / static_cast<double>(micro_batches + pipeline - 1));
    if (pipeline != 5) {
      EXPECT_NEAR(e.counted_bubble, e.predicted_bubble, 1e-3);
    }
    return e.time.bubble / e.time.compute;
  };
  EXPECT_EQ(idle(1, 8), 0);
  EXPECT_NEAR(idle(4, 1), 3.0, 1e-3);
  EXPECT_NEAR(idle(4, 8), 3.0 / 8, 1e-3);
  EXPECT_NEAR(idle(4, 250000), 3.0 / 250000, 1e-3);
  // Five stages of 2, 2, 2, 3 and 3 blocks: the first micro-batch passes the other four stages, 9
  // blocks, while the busiest of 3 waits.
  EXPECT_NEAR(idle(5, 1), 9.0 / 3, 1e-3);
}

// Two stages of two blocks, two micro-batches of two sequences, four tensor ranks. An all-reduce of
// 2*64*512 elements sends 3/2 of their bytes.
TEST(Mesh, TensorAndPipelineTrafficAreCountedWhereTheyAre) {
  const Workload plain = SmallGpt2(4, 1024);
  Workload work = plain;
  work.options.micro_batch = 2;
  work.micro_batches = 2;
  Configuration c;
  c.tensor = 4;
  c.pipeline = 2;
  const uint64_t boundary = 2 * 64 * 512 * 2, sum = boundary * 3 / 2;
  for (const bool checkpointing : {false, true}) {
    c.checkpointing = checkpointing;
    const Evaluation e = Evaluate(work, ClusterOf(8, 80 * kGB, 0, 0), c);
    ASSERT_EQ(e.positions.size(), 2u);
    const PositionPlan &first = e.positions[0], &last = e.positions[1];
    const uint64_t blocks = 2 * 2;  // a step: two of each micro-batch
    const uint64_t backward = checkpointing ? 3 : 2;
    EXPECT_EQ(first.traffic[2][0], (2 + blocks * 2) * sum);  // and the embedding's rows
    EXPECT_EQ(first.traffic[2][1], blocks * backward * sum);
    EXPECT_EQ(first.tensor[2], first.traffic[2]);
    EXPECT_EQ(last.traffic[2][0], blocks * 2 * sum);
    EXPECT_EQ(last.traffic[2][1], (blocks * backward + 2) * sum);  // the head's, by halves
    // Three numbers a token to three ranks.
    EXPECT_EQ(last.tensor[0][0], uint64_t{2} * 2 * 64 * 3 * 4 * 3);
    EXPECT_EQ(first.traffic[4][0], 2 * boundary);
    EXPECT_EQ(first.traffic[4][1], 0u);
    EXPECT_EQ(last.traffic[4][0], 0u);
    EXPECT_EQ(last.traffic[4][1], 2 * boundary);
    // The tied table's rows of this rank, once a step each way.
    EXPECT_EQ(first.traffic[4][2], uint64_t{1024} / 4 * 512 * 2);
    EXPECT_EQ(last.traffic[4][2], first.traffic[4][2]);
    EXPECT_EQ(e.accumulation, 2);
  }
  // With divided rows a quarter crosses to the next stage, and sums are scattered and gathered.
  c.checkpointing = false;
  c.sequence_parallel = true;
  const Evaluation rows = Evaluate(work, ClusterOf(8, 80 * kGB, 0, 0), c);
  EXPECT_EQ(rows.positions[0].traffic[4][0], 2 * boundary / 4);
  EXPECT_EQ(rows.positions[0].tensor[1][0], (2 + 2 * 2 * 2) * sum / 2);
  EXPECT_EQ(rows.positions[0].tensor[0][1], (2 + 2 * 2 * 4) * sum / 2);
  c.sequence_parallel = false;
  const Evaluation whole = Evaluate(work, ClusterOf(8, 80 * kGB, 0, 0), c);
  EXPECT_LT(rows.bytes.activations, whole.bytes.activations);
}

// A long step is counted by its beginning: as if each micro-batch were.
TEST(Mesh, ALongStepIsWhatItsScheduleDoes) {
  for (const int virtual_stages : {1, 2}) {
    for (const int64_t micro_batches : {9, 23, 24, 61}) {
      for (int stage = 0; stage <= 3; ++stage) {
        Workload work = SmallGpt2(7, 1024);
        work.options.max_reuse_distance = 20'000'000;  // some units are kept
        work.options.persistence_threshold = 0;
        work.micro_batches = 2 * micro_batches;
        Configuration c;
        c.stage = stage;
        c.pipeline = 3;
        c.data = 2;
        c.tensor = 2;
        c.virtual_stages = virtual_stages;
        const Evaluation e = Evaluate(work, ClusterOf(12, 80 * kGB, 0, 0), c);
        ASSERT_EQ(e.impossible, "");
        ZeroOptions options = work.options;
        options.stage = stage;
        options.world = 2;
        options.micro_batches = work.micro_batches;
        const auto schedules = MakePipelineSchedule(
            {.stages = 3, .virtual_stages = virtual_stages, .micro_batches = micro_batches});
        const CutModel cut(&work.model, c.Cut(), false);
        for (const PositionPlan& at : e.positions) {
          const StageModel part = cut.Part(at.pipeline);
          const RankSchedule& schedule = (*schedules)[static_cast<size_t>(at.pipeline)];
          const ZeroPolicy policy = MakeStagePolicy(part, options, schedule);
          const RankPlan plan = PlanRank(part, policy, schedule, 0, 12, cut.Share(0));
          EXPECT_EQ(at.traffic, plan.step) << Describe(c) << " of " << micro_batches;
          EXPECT_EQ(at.bytes.parameters, plan.parameters);
          EXPECT_EQ(at.bytes.gradients, plan.gradients);
          EXPECT_EQ(at.bytes.activations, plan.activations);
          EXPECT_EQ(at.bytes.buffers, TransientBytes(part.model, policy));
        }
      }
    }
  }
}

TEST(Mesh, FullGradientsTakeMemoryAndSaveTraffic) {
  Workload work = SmallGpt2(8, 1024);
  work.micro_batches = 16;
  Configuration c;
  c.stage = 2;
  c.pipeline = 2;
  c.data = 4;
  const Evaluation sharded = Evaluate(work, ClusterOf(8, 80 * kGB, 0, 0), c);
  c.full_gradients = true;
  const Evaluation full = Evaluate(work, ClusterOf(8, 80 * kGB, 0, 0), c);
  const PositionPlan &last = sharded.positions.back(), &kept = full.positions.back();
  // Four micro-batches a rank: a reduce-scatter each, or one; fp32 sums of a quarter, or of all.
  EXPECT_NEAR(static_cast<double>(last.traffic[1][1]),
              4.0 * static_cast<double>(kept.traffic[1][2]),
              0.01 * static_cast<double>(last.traffic[1][1]));
  EXPECT_EQ(kept.traffic[1][1], 0u);
  EXPECT_NEAR(static_cast<double>(kept.bytes.gradients),
              4.0 * static_cast<double>(last.bytes.gradients),
              0.01 * static_cast<double>(kept.bytes.gradients));
}

// Narayanan et al. 2021, table 1: what trained on A100s of 80 GB, data parallel without ZeRO, with
// activations computed again, 2048 tokens, a vocabulary of 51200. Each fits here too, and no half
// as many tensor and pipeline ranks hold the four whose state alone is more (18 bytes a parameter:
// gradients are added up in fp32).
TEST(Published, TheConfigurationsOfMegatronFitAndHaveTheirParameters) {
  struct Row {
    double billions;
    uint32_t heads, hidden, layers;
    int tensor, pipeline, devices;
    int64_t batch;
  };
  constexpr Row kRows[] = {
      {1.7, 24, 2304, 24, 1, 1, 32, 512},          {3.6, 32, 3072, 30, 2, 1, 64, 512},
      {7.5, 32, 4096, 36, 4, 1, 128, 512},         {18.4, 48, 6144, 40, 8, 1, 256, 1024},
      {39.1, 64, 8192, 48, 8, 2, 512, 1536},       {76.1, 80, 10240, 60, 8, 4, 1024, 1792},
      {145.6, 96, 12288, 80, 8, 8, 1536, 2304},    {310.1, 128, 16384, 96, 8, 16, 1920, 2160},
      {529.6, 128, 20480, 105, 8, 35, 2520, 2520}, {1008.0, 160, 25600, 128, 8, 64, 3072, 3072}};
  for (const Row& row : kRows) {
    v1::ModelSpec spec;
    spec.set_architecture("gpt2");
    spec.set_hidden_size(row.hidden);
    spec.set_layers(row.layers);
    spec.set_heads(row.heads);
    spec.set_sequence_length(2048);
    spec.set_vocab_size(51200);
    Workload work;
    work.model = *MakeModelTable(spec);
    work.options.dtype = DType::kBF16;
    work.micro_batches = row.batch;
    EXPECT_NEAR(Count(work) * 1e-9, row.billions, 0.06) << row.billions;
    Configuration c;
    c.checkpointing = true;
    c.tensor = row.tensor;
    c.pipeline = row.pipeline;
    c.data = row.devices / (row.tensor * row.pipeline);
    const Evaluation e = Evaluate(work, ClusterOf(row.devices, 80 * kGB, 0, 0), c);
    ASSERT_EQ(e.impossible, "");
    EXPECT_TRUE(e.Fits()) << row.billions << " B: " << e.bytes.Device();
    const double state = 18 * Count(work) / (row.tensor * row.pipeline);
    const Footprint& b = e.positions[e.positions.size() / 2].bytes;
    const auto seen = static_cast<double>(b.parameters + b.gradients + b.optimizer);
    EXPECT_NEAR(seen, state, 0.12 * state) << row.billions;
    if (row.pipeline == 1 || 2 * state < 80e9) continue;
    c.pipeline /= 2;
    c.data = row.devices / (row.tensor * c.pipeline);
    if (row.devices % (row.tensor * c.pipeline) != 0) continue;
    EXPECT_FALSE(Evaluate(work, ClusterOf(row.devices, 80 * kGB, 0, 0), c).Fits());
  }
}

// Korthikanti et al. 2022, equations 2 and 4: with t tensor ranks a block keeps s b h (10 + 24/t)
// bytes, and 34/t with divided rows, attention's scores apart. Here 4 + 16/t and 20/t, as norms'
// outputs, GELU and dropout masks are made again; statistics of the norms and of attention beside.
TEST(Published, ABlockKeepsLessThanMegatronsForWhatIsMadeAgain) {
  v1::ModelSpec spec;
  spec.set_architecture("gpt2");
  spec.set_hidden_size(12288);
  spec.set_layers(96);
  spec.set_heads(96);
  spec.set_sequence_length(2048);
  spec.set_vocab_size(51200);
  ModelTable model = *MakeModelTable(spec);
  const double unit = 2048.0 * 12288;
  for (const bool divided : {false, true}) {
    model.config.sequence_parallel = divided;
    const ModelConfig slice = MakeTensorRank(model, 8, 0).model.config;
    const auto kept = static_cast<double>(
        MakeActivationTable(slice, UnitKind::kBlock, 1, DType::kBF16, false).kept_bytes);
    const double wanted = divided ? 20.0 / 8 : 4 + 16.0 / 8;
    EXPECT_NEAR(kept, wanted * unit, 0.01 * wanted * unit);
    EXPECT_LT(kept, (divided ? 34.0 / 8 : 10 + 24.0 / 8) * unit);
  }
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
  // Backward is twice the forward; of the embedding one operation an element and pass.
  const double operations =
      3 * ForwardOperations(work.model.config) + 2 * static_cast<double>(work.model.config.hidden);
  EXPECT_NEAR(e.time.compute, tokens * operations / 0.5e12, 1e-9 * e.time.compute);
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
  // Fewer than stages are trained, mostly idle, and not proposed.
  c.pipeline = 4;
  const Evaluation idle = Evaluate(work, ClusterOf(4, 80 * kGB, 0, 0), c);
  EXPECT_EQ(idle.impossible, "");
  EXPECT_DOUBLE_EQ(idle.predicted_bubble, 3.0 / 5);
  const auto found = SmallestThatFits(work, ClusterOf(4, 16 * kGB, 0, 0), true);
  ASSERT_TRUE(found.has_value());
  EXPECT_LE(found->configuration.pipeline, 2);
  // What no schedule lists is said.
  work.micro_batches = int64_t{1} << 20;
  EXPECT_THAT(Evaluate(work, ClusterOf(4, 80 * kGB, 0, 0), c).impossible,
              HasSubstr("1048576 micro-batches a rank in 4 x 1 pipeline stages"));
}

}  // namespace
}  // namespace zeroshard
