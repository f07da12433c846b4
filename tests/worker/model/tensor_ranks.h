// A model split over tensor ranks, which are threads of the test's process, each with a device of
// its own.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/plan/tensor_slices.h"
#include "gtest/gtest.h"
#include "tests/worker/device/guarded_device.h"
#include "tests/worker/device/guarded_ops.h"
#include "tests/worker/model/model_runner.h"
#include "worker/comm/memory_rendezvous.h"
#include "worker/comm/staged_communicator.h"
#include "worker/comm/tensor_group.h"

namespace zeroshard {

// Values of every element, so that none counts twice or not at all unseen: flat vectors by unit.
inline std::vector<std::vector<float>> AnyParameters(const ModelTable& model, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> flat;
  for (const UnitTable& unit : model.units) {
    flat.emplace_back(static_cast<size_t>(unit.length));
    for (const ParameterInfo& p : unit.parameters) {
      const float base = p.init == InitKind::kOnes ? 1.0f : 0.0f;
      for (int64_t i = 0; i < p.size; ++i)
        flat.back()[static_cast<size_t>(p.offset + i)] = base + 0.1f * normal(random);
    }
  }
  return flat;
}

// A rank's flat vectors of the full ones; zeros where there is padding.
inline std::vector<std::vector<float>> SliceOf(const TensorRank& slice, const ModelTable& full,
                                               const std::vector<std::vector<float>>& flat) {
  std::vector<std::vector<float>> local;
  for (size_t u = 0; u < full.units.size(); ++u) {
    const int64_t length = slice.model.units[u].length;
    local.emplace_back(static_cast<size_t>(length));
    for (const SliceRun& run : FullRuns(slice, u, {0, length})) {
      const auto from = flat[u].begin() +
                        full.units[u].parameters[static_cast<size_t>(run.parameter)].offset +
                        run.element;
      std::copy(from, from + run.size, local.back().begin() + run.local);
    }
  }
  return local;
}

class TensorRanks {
 public:
  // With a seed on devices that the host cannot reach and whose work is done late.
  TensorRanks(const ModelTable& full, int tensor, std::optional<uint64_t> guarded = std::nullopt)
      : full_(full), guarded_(guarded.has_value()) {
    for (int rank = 0; rank < tensor; ++rank) {
      slices.push_back(MakeTensorRank(full, tensor, rank));
      if (guarded.has_value()) {
        // Three schedules: the seed says which, on all ranks.
        auto device = std::make_unique<GuardedDevice>(*guarded + 3 * static_cast<uint64_t>(rank));
        ops.push_back(std::make_unique<GuardedOps>(device.get()));
        devices.push_back(std::move(device));
      } else {
        devices.push_back(MakeCpuDevice());
        ops.push_back(MakeCpuOps(1));
      }
    }
    lines.resize(static_cast<size_t>(tensor));
    groups.resize(static_cast<size_t>(tensor));
    Each([&](size_t rank) { Connect(rank); });
  }

  int size() const { return static_cast<int>(slices.size()); }

  void Each(const std::function<void(size_t)>& body) const {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < slices.size(); ++rank)
      threads.emplace_back([&body, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  }

  // Of every rank, as RunModel.
  std::vector<RunResult> Run(const std::vector<std::vector<float>>& flat,
                             const std::vector<int32_t>& tokens,
                             const std::vector<int32_t>& targets, const RunOptions& options) const {
    std::vector<RunResult> results(slices.size());
    Each([&](size_t rank) {
      absl::StatusOr<RunResult> result =
          RunModel(slices[rank].model, SliceOf(slices[rank], full_, flat), tokens, targets,
                   OptionsOf(rank, options));
      EXPECT_TRUE(result.ok()) << result.status();
      if (result.ok()) results[rank] = *std::move(result);
    });
    return results;
  }

  std::vector<std::vector<float>> Decode(const std::vector<std::vector<float>>& flat,
                                         const std::vector<int32_t>& tokens,
                                         const std::vector<int64_t>& pieces,
                                         const RunOptions& options) const {
    std::vector<std::vector<float>> results(slices.size());
    Each([&](size_t rank) {
      absl::StatusOr<std::vector<float>> result =
          DecodeModel(slices[rank].model, SliceOf(slices[rank], full_, flat), tokens, pieces,
                      static_cast<int64_t>(tokens.size()), OptionsOf(rank, options));
      EXPECT_TRUE(result.ok()) << result.status();
      if (result.ok()) results[rank] = *std::move(result);
    });
    return results;
  }

  std::vector<TensorRank> slices;
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<std::unique_ptr<Ops>> ops;
  std::vector<TensorLines> lines;
  std::vector<std::unique_ptr<TensorGroup>> groups;

 private:
  void Connect(size_t rank) {
    CommunicatorOptions job;
    job.rank = static_cast<int>(rank);
    job.size = size();
    job.host = "127.0.0.1";
    job.connect_timeout = job.operation_timeout = absl::Seconds(60);
    MeshLine line{.dimension = "tensor", .line = 0, .ranks = {}};
    for (int r = 0; r < size(); ++r) line.ranks.push_back(r);
    const int copies = slices[rank].slices[1][Position("attn.k.weight")].copies;
    Device* const device = devices[rank].get();
    absl::StatusOr<TensorLines> made =
        MakeTensorLines(line, copies, job, &rendezvous_, device,
                        [this](const CommunicatorOptions& options, Rendezvous* keys,
                               Device* on) -> absl::StatusOr<std::unique_ptr<Communicator>> {
                          auto gloo = MakeGlooCommunicator(options, keys, on);
                          if (!gloo.ok() || !guarded_) return gloo;
                          return MakeStagedCommunicator(*std::move(gloo), on);
                        });
    ASSERT_TRUE(made.ok()) << made.status();
    lines[rank] = *std::move(made);
    groups[rank] = std::make_unique<TensorGroup>(lines[rank].line.get(), lines[rank].copies.get(),
                                                 device->compute());
  }

  // In the table of a block.
  size_t Position(const std::string& suffix) const {
    const UnitTable& block = full_.units[1];
    return static_cast<size_t>(block.Find(suffix) - block.parameters.data());
  }

  RunOptions OptionsOf(size_t rank, RunOptions options) const {
    options.device = devices[rank].get();
    options.ops = ops[rank].get();
    options.slice = &slices[rank];
    options.group = groups[rank].get();
    return options;
  }

  const ModelTable full_;
  const bool guarded_;
  MemoryRendezvous rendezvous_;
};

inline double NormOf(const std::vector<float>& values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

}  // namespace zeroshard
