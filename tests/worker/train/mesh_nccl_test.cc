// Meshes over the NCCL communicator and a fake NCCL. Each rank's GPU has room for one kernel alone,
// and a kernel waits there for its peers: what a rank enqueues on its lines, one after the other,
// must then be an order in which all ranks get through.
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/worker/comm/nccl/fake_nccl.h"
#include "tests/worker/train/mesh_job.h"
#include "tests/worker/train/offload_harness.h"
#include "worker/comm/nccl/nccl_communicator.h"

namespace zeroshard {
namespace {

// Trains, and returns what every rank agrees on.
std::string OverNccl(const v1::JobSpec& spec, MeshRun run) {
  FakeNccl nccl;
  nccl.NoRoomForTwoKernels();
  run.communicators = [&nccl](int rank) -> CommunicatorMaker {
    return [&nccl, rank, order = std::make_shared<LaunchOrder>()](
               const CommunicatorOptions& options, Rendezvous* rendezvous, Device* device) {
      return MakeNcclCommunicator(options, NcclTuning{.order = order}, nccl.Api(rank), rendezvous,
                                  device);
    };
  };
  const std::string print = MeshFingerprint(spec, run, MeshData());
  EXPECT_THAT(nccl.violations(), testing::IsEmpty());
  return print;
}

// As the Gloo communicator trains, bit for bit: sums of a deterministic job are in rank order.
void ExpectAsOverGloo(const std::string& model, const MeshRun& run, int stage,
                      bool sequence_parallel = false) {
  SCOPED_TRACE(absl::StrFormat("%s on %s, %d runs, ZeRO stage %d", model, NameOf(run.shape),
                               run.virtual_stages, stage));
  v1::JobSpec spec = MakeSpec(
      MeshJob(model), {"deterministic=true", absl::StrFormat("zero_optimization.stage=%d", stage)});
  spec.mutable_parallel()->set_sequence_parallel(sequence_parallel);
  EXPECT_EQ(OverNccl(spec, run), MeshFingerprint(spec, run, MeshData()));
}

constexpr MeshShape kCube{.pipeline = 2, .data = 2, .tensor = 2};

TEST(MeshNcclTest, EveryZeroStageGetsThrough) {
  for (const int stage : {0, 1, 2, 3}) ExpectAsOverGloo("tied-llama", {.shape = kCube}, stage);
}

TEST(MeshNcclTest, InterleavedStagesAndSequenceParallelismGetThrough) {
  ExpectAsOverGloo("gpt2", {.shape = kCube, .virtual_stages = 2}, 3);
  ExpectAsOverGloo("llama", {.shape = kCube}, 3, /*sequence_parallel=*/true);
}

// NCCL adds in an order of its own.
TEST(MeshNcclTest, SumsOfNcclAndFullGradientsGetThrough) {
  for (const int stage : {0, 3}) {
    const v1::JobSpec spec =
        MakeSpec(MeshJob("gpt2"), {absl::StrFormat("zero_optimization.stage=%d", stage)});
    EXPECT_NE(OverNccl(spec, {.shape = kCube, .full_gradients = stage == 3}), "");
  }
}

TEST(MeshNcclTest, OffloadedStepsGetThrough) {
  for (const int stage : {1, 3}) {
    for (const Offload offload : OffloadsOf(stage)) {
      const v1::JobSpec spec = Spec(MeshJob("llama"), {1, stage}, offload, {"deterministic=true"});
      MemoryStores stores(spec, {.seed = 1}), same(spec, {.seed = 1});
      MeshRun run{.shape = kCube};
      run.store = [&stores](int rank) { return stores.MakeRank(rank); };
      const std::string print = OverNccl(spec, run);
      run.store = [&same](int rank) { return same.MakeRank(rank); };
      EXPECT_EQ(print, MeshFingerprint(spec, run, MeshData())) << "stage " << stage;
    }
  }
}

TEST(MeshNcclTest, EvaluationsGetThrough) {
  const MemoryDataset eval(ChainTokens(12 * 11 + 1, 53, 99), 12);
  const v1::JobSpec spec =
      MakeSpec(MeshJob("gpt2"), {"deterministic=true", "zero_optimization.stage=3",
                                 "eval={data: [unused], interval_steps: 1}"});
  const MeshRun run{.shape = kCube, .virtual_stages = 2, .eval_data = &eval};
  EXPECT_EQ(OverNccl(spec, run), MeshFingerprint(spec, run, MeshData()));
}

TEST(MeshNcclTest, LongLinesGetThrough) {
  ExpectAsOverGloo("gpt2", {.shape = {.pipeline = 4, .tensor = 2}}, 1);
  ExpectAsOverGloo("llama", {.shape = {.data = 2, .tensor = 4}}, 3);
}

}  // namespace
}  // namespace zeroshard
