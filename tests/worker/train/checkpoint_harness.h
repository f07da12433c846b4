// Jobs that write checkpoints, and what is in them.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "common/checkpoint/reader.h"
#include "common/checkpoint/store.h"
#include "tests/common/temp_folder.h"
#include "tests/worker/train/cluster_harness.h"

namespace zeroshard {

struct Shape {
  int world = 1;
  int stage = 0;
};

inline std::vector<Shape> AllShapes() {
  std::vector<Shape> shapes;
  for (int world : {1, 2, 3, 4})
    for (int stage : {0, 1, 2, 3}) shapes.push_back({world, stage});
  return shapes;
}

// A job of this shape that saves after its last step into `dir` (none where that is empty).
inline v1::JobSpec SavingSpec(const std::string& text, Shape shape, uint64_t steps,
                              const std::string& dir, std::vector<std::string> more = {}) {
  more.push_back(absl::StrFormat("resources.workers=%d", shape.world));
  more.push_back(absl::StrFormat("zero_optimization.stage=%d", shape.stage));
  v1::JobSpec spec = MakeSpec(text, more);
  spec.set_steps(steps);
  if (!dir.empty()) spec.mutable_checkpoint()->set_dir(dir);
  return spec;
}

// A learning rate that moves no fp32 weight of these models.
inline std::vector<std::string> Still(std::vector<std::string> more = {}) {
  for (const char* key : {"optimizer.params.lr=1.0e-30", "optimizer.params.weight_decay=0",
                          "scheduler.type=constant", "scheduler.params={}"})
    more.push_back(key);
  return more;
}

// The values of every tensor of one kind, by name.
using Values = std::map<std::string, std::vector<float>>;
struct State {
  Values of[kStateKinds];
};

// What CheckpointReader reads of a checkpoint: all kinds of what is trainable, masters of the rest.
inline State ReadState(const std::string& path) {
  State state;
  auto reader = CheckpointReader::Open(path);
  EXPECT_TRUE(reader.ok()) << reader.status();
  if (!reader.ok()) return state;
  EXPECT_TRUE((*reader)->VerifyFiles(0, 1).ok());
  const auto model = MakeModelTable((*reader)->manifest().spec.model());
  EXPECT_TRUE(model.ok()) << model.status();
  EXPECT_TRUE((*reader)->CheckModel(*model, true).ok());
  for (int kind = 0; kind < kStateKinds; ++kind) {
    const auto source = (*reader)->Source(static_cast<StateKind>(kind));
    for (const UnitTable& unit : model->units) {
      for (const ParameterInfo& tensor : unit.parameters) {
        if (kind != 0 && !tensor.trainable) continue;
        std::vector<float>& values = state.of[kind][tensor.name];
        values.resize(static_cast<size_t>(tensor.size));
        const absl::Status read = source->Read(tensor, 0, tensor.size, values.data());
        EXPECT_TRUE(read.ok()) << read;
      }
    }
  }
  return state;
}

// Bit for bit, by parameter name.
inline void ExpectSameState(const State& seen, const State& wanted, const std::string& what) {
  for (int kind = 0; kind < kStateKinds; ++kind) {
    const Values& a = seen.of[kind];
    const Values& b = wanted.of[kind];
    ASSERT_EQ(a.size(), b.size()) << what;
    for (const auto& [name, values] : b) {
      const auto found = a.find(name);
      ASSERT_NE(found, a.end()) << what << ": " << name;
      ASSERT_EQ(found->second.size(), values.size()) << what << ": " << name;
      ASSERT_EQ(std::memcmp(found->second.data(), values.data(), values.size() * sizeof(float)), 0)
          << what << ": " << NameOf(static_cast<StateKind>(kind)) << " of " << name;
    }
  }
}

inline void ExpectAllOk(const std::vector<RankResult>& results, const std::string& what = "") {
  for (const RankResult& result : results) ASSERT_TRUE(result.status.ok()) << what << result.status;
}

inline RunOptions Resume(int world, const std::string& checkpoint, uint64_t step) {
  RunOptions options;
  options.world = world;
  options.resume_from = checkpoint;
  options.first_step = step + 1;
  return options;
}

}  // namespace zeroshard
