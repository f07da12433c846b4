// Meshes over the worker's own client and real stores, in memory and on a disk: ranges that begin
// and end anywhere, pushed by tensor ranks, seal each chunk; and meshes follow each other on it.
#include <map>
#include <string>
#include <vector>

#include "tests/common/temp_folder.h"
#include "tests/worker/train/memory_stores.h"
#include "tests/worker/train/mesh_job.h"
#include "tests/worker/train/served_stores.h"

namespace zeroshard {
namespace {

// Several chunks a unit, which tensor and data ranks share.
constexpr int64_t kElements = 4096;

v1::JobSpec ServedSpec(const std::string& model, const char* device,
                       std::vector<std::string> more = {}) {
  more.push_back("zero_optimization.stage=2");
  more.push_back(absl::StrFormat("zero_optimization.offload_optimizer.device=%s", device));
  more.push_back("store.replicas=2");
  more.push_back("steps=6");
  return MakeSpec(MeshJob(model), more);
}

// Each with two steps of the six; (data, tensor, pipeline).
const std::vector<MeshShape>& Meshes() {
  static const std::vector<MeshShape> meshes = {
      {.data = 2, .tensor = 2},                  // (2, 2, 1)
      {.data = 1, .tensor = 2},                  // resized to (1, 2, 1)
      {.pipeline = 2, .data = 1, .tensor = 2}};  // (1, 2, 2)
  return meshes;
}

// Trains two steps on each mesh; `open` before each, `digest` of the weights after a step. Returns
// what was recorded and the digests.
template <typename Open, typename Digest, typename MakeRank>
std::string TrainOnAll(const v1::JobSpec& spec, const Open& open, const Digest& digest,
                       const MakeRank& make_rank) {
  const MemoryDataset data = MeshData();
  RankResult all;
  std::string digests;
  uint64_t step = 0;
  for (const MeshShape& shape : Meshes()) {
    open();
    v1::JobSpec part = spec;
    part.set_steps(step + 2);  // the rate is constant
    MeshRun run{.shape = shape};
    run.first_step = step + 1;
    run.next_sample = 6 * step;
    run.store = make_rank;
    const auto results = TrainMesh(part, run, data);
    for (const RankResult& result : results) EXPECT_TRUE(result.status.ok()) << result.status;
    all.records.insert(all.records.end(), results[0].records.begin(), results[0].records.end());
    step += 2;
    absl::StrAppend(&digests, digest(step), "\n");
  }
  return Fingerprint(all) + digests;
}

TEST(ServedMeshTest, MeshesFollowEachOtherOnRealStores) {
  const TempFolder folder;
  for (const char* model : {"gpt2", "llama"}) {
    for (const char* device : {"cpu", "nvme"}) {
      SCOPED_TRACE(absl::StrCat(model, " on ", device));
      const v1::JobSpec spec = ServedSpec(model, device);
      MemoryStores strict(spec, {});
      int opened = 0;
      const std::string wanted = TrainOnAll(
          spec,
          [&] {
            if (opened++ > 0) strict.Continue();
          },
          [&](uint64_t step) {
            strict.WaitForVersion(step);
            return strict.Digest();
          },
          [&](int rank) { return strict.MakeRank(rank); });
      ServedStores stores(spec, 3, kElements, device == std::string("nvme") ? folder.path() : "");
      EXPECT_EQ(
          TrainOnAll(
              spec, [&] { stores.Open(); }, [&](uint64_t step) { return stores.Digest(step); },
              [&](int rank) { return stores.MakeRank(rank); }),
          wanted);
      uint64_t trained = 0;  // bytes of a step: each element once, to two replicas
      for (const UnitTable& unit : strict.model().units)
        trained += static_cast<uint64_t>(unit.length) * 4 * 2;
      EXPECT_EQ(stores.pushed(), trained * spec.steps());
    }
  }
}

}  // namespace
}  // namespace zeroshard
