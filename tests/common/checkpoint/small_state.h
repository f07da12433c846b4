// A small model's state: every value says of what it is, so that any mistake in reading shows.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/reader.h"
#include "common/checkpoint/store.h"
#include "common/status_macros.h"

namespace zeroshard {

// Three trained tensors and a frozen one.
inline ModelTable SmallModel() {
  const auto parameter = [](const std::string& name, std::vector<int64_t> shape, bool trainable) {
    ParameterInfo info;
    info.name = name;
    info.shape = std::move(shape);
    info.size = 1;
    for (const int64_t extent : info.shape) info.size *= extent;
    info.trainable = trainable;
    return info;
  };
  ModelTable model;
  model.units.resize(2);
  model.units[0].parameters = {parameter("wte.weight", {7, 5}, true),
                               parameter("wpe.weight", {3, 4}, false)};
  model.units[1].parameters = {parameter("head.weight", {2, 3, 4}, true),
                               parameter("head.bias", {13}, true)};
  return model;
}

inline std::vector<ParameterInfo> ParametersOf(const ModelTable& model) {
  std::vector<ParameterInfo> all;
  for (const UnitTable& unit : model.units) {
    all.insert(all.end(), unit.parameters.begin(), unit.parameters.end());
  }
  return all;
}

// Exact in fp32: below 2^24.
inline float ValueOf(uint64_t step, StateKind kind, size_t tensor, int64_t element) {
  return static_cast<float>(step * 100'000 + static_cast<uint64_t>(kind) * 10'000 + tensor * 1'000 +
                            static_cast<uint64_t>(element));
}

// What rank `rank` of `world` saves: a contiguous part of all values of every kind.
class SmallState {
 public:
  SmallState(uint64_t step, int rank, int world) {
    const std::vector<ParameterInfo> parameters = ParametersOf(SmallModel());
    for (int kind = 0; kind < kStateKinds; ++kind) {
      int64_t total = 0;
      for (const ParameterInfo& p : parameters) total += p.size;
      const int64_t from = total * rank / world, to = total * (rank + 1) / world;
      int64_t at = 0;
      for (size_t i = 0; i < parameters.size(); ++i) {
        const ParameterInfo& p = parameters[i];
        const int64_t begin = std::clamp<int64_t>(from - at, 0, p.size);
        const int64_t end = std::clamp<int64_t>(to - at, 0, p.size);
        at += p.size;
        if (begin >= end || (kind != 0 && !p.trainable)) continue;
        auto values = std::make_unique<std::vector<float>>();
        for (int64_t e = begin; e < end; ++e) {
          values->push_back(ValueOf(step, static_cast<StateKind>(kind), i, e));
        }
        pieces.push_back(
            {static_cast<StateKind>(kind), p.name, p.shape, begin, end, values->data()});
        values_.push_back(std::move(values));
      }
    }
  }

  std::vector<StatePiece> pieces;

 private:
  std::vector<std::unique_ptr<std::vector<float>>> values_;
};

inline Manifest SmallManifest(uint64_t step, int world, const std::string& run_id) {
  Manifest manifest;
  manifest.run_id = run_id;
  manifest.job = "small";
  manifest.step = step;
  manifest.unix_ms = 1'700'000'000'000;
  manifest.world_size = static_cast<uint32_t>(world);
  manifest.next_sample = step * 8;
  manifest.samples = 1000;
  manifest.spec.set_name("small");
  manifest.spec.set_steps(100);
  return manifest;
}

// One save as ranks and rank 0 do it, one after the other.
inline absl::StatusOr<std::string> TrySave(CheckpointStore* store, FileSystem* files, uint64_t step,
                                           int world, const std::string& run_id) {
  ZS_ASSIGN_OR_RETURN(const std::string folder, store->Begin(step));
  Manifest manifest = SmallManifest(step, world, run_id);
  for (int rank = 0; rank < world; ++rank) {
    const SmallState state(step, rank, world);
    ZS_ASSIGN_OR_RETURN(CheckpointFile file,
                        WriteStateFile(files, folder, rank, world, state.pieces));
    manifest.files.push_back(std::move(file));
  }
  return store->Complete(manifest);
}

inline absl::StatusOr<std::string> Save(CheckpointStore* store, FileSystem* files, uint64_t step,
                                        int world, const std::string& run_id) {
  absl::StatusOr<std::string> path = TrySave(store, files, step, world, run_id);
  if (!path.ok()) store->Abandon(step);
  return path;
}

// Every checksum, every tensor, every value.
inline testing::AssertionResult IsWhole(const std::string& path, uint64_t step) {
  const auto reader = CheckpointReader::Open(path);
  if (!reader.ok()) return testing::AssertionFailure() << reader.status();
  if ((*reader)->manifest().step != step) {
    return testing::AssertionFailure() << path << " is of step " << (*reader)->manifest().step;
  }
  for (const absl::Status& status :
       {(*reader)->VerifyFiles(0, 1), (*reader)->CheckModel(SmallModel(), true)}) {
    if (!status.ok()) return testing::AssertionFailure() << status;
  }
  const std::vector<ParameterInfo> parameters = ParametersOf(SmallModel());
  for (int kind = 0; kind < kStateKinds; ++kind) {
    const auto source = (*reader)->Source(static_cast<StateKind>(kind));
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (kind != 0 && !parameters[i].trainable) continue;
      std::vector<float> values(static_cast<size_t>(parameters[i].size), -1);
      const absl::Status read = source->Read(parameters[i], 0, parameters[i].size, values.data());
      if (!read.ok()) return testing::AssertionFailure() << read;
      for (int64_t e = 0; e < parameters[i].size; ++e) {
        const float wanted = ValueOf(step, static_cast<StateKind>(kind), i, e);
        if (values[static_cast<size_t>(e)] != wanted) {
          return testing::AssertionFailure()
                 << NameOf(static_cast<StateKind>(kind)) << " of " << parameters[i].name << "[" << e
                 << "] is " << values[static_cast<size_t>(e)] << ", wanted " << wanted;
        }
      }
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace zeroshard
