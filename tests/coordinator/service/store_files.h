// State files as the shard stores of an offloaded job write them.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

#include "common/checkpoint/state_digest.h"
#include "common/checkpoint/store.h"
#include "common/plan/model_table.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::coordinator {

// What `count` stores write of a state whose every value says what it is: store i has every
// count-th tensor. The digests are those of whole units in the last report, zero in the others:
// they are added.
inline std::vector<v1::SnapshotReport> WriteAsStores(const v1::JobSpec& spec,
                                                     const std::string& folder, uint64_t step,
                                                     int count) {
  const auto model = MakeModelTable(spec.model());
  EXPECT_TRUE(model.ok()) << model.status();
  std::vector<v1::SnapshotReport> reports(static_cast<size_t>(count));
  std::vector<std::vector<StatePiece>> pieces(static_cast<size_t>(count));
  std::deque<std::vector<float>> values;
  WeightDigest digests[kStateKinds];
  size_t tensors = 0;
  for (size_t unit = 0; unit < model->units.size(); ++unit) {
    const UnitTable& table = model->units[unit];
    for (int kind = 0; kind < kStateKinds; ++kind) {
      std::vector<float> flat(static_cast<size_t>(table.length));
      for (const ParameterInfo& tensor : table.parameters) {
        std::vector<float>& of = values.emplace_back();
        for (int64_t e = 0; e < tensor.size; ++e) {
          of.push_back(static_cast<float>(kind + 1) + static_cast<float>(tensors + unit) +
                       0.001f * static_cast<float>(e));
          flat[static_cast<size_t>(tensor.offset + e)] = of.back();
        }
        pieces[tensors++ % pieces.size()].push_back(
            {static_cast<StateKind>(kind), tensor.name, tensor.shape, 0, tensor.size, of.data()});
      }
      digests[kind].Add(unit, 0, flat);
    }
  }
  for (int store = 0; store < count; ++store) {
    v1::SnapshotReport& report = reports[static_cast<size_t>(store)];
    const auto file = WriteStateFile(&FileSystem::Real(), folder, store, count,
                                     pieces[static_cast<size_t>(store)]);
    EXPECT_TRUE(file.ok()) << file.status();
    if (!file.ok()) continue;
    report.set_step(step);
    report.set_done(true);
    report.set_file(file->name);
    report.set_bytes(file->bytes);
    report.set_crc32c(file->crc32c);
    for (const WeightDigest& digest : digests) {
      report.add_digests(store + 1 == count ? digest.low : 0);
      report.add_digests(store + 1 == count ? digest.high : 0);
    }
  }
  return reports;
}

}  // namespace zeroshard::coordinator
