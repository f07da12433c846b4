// Checkpoints on disk, as a job's ranks write them.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/checkpoint/reader.h"
#include "common/checkpoint/store.h"

namespace zeroshard::coordinator {

// A complete checkpoint of `step`, with one small file in it, that `run_id`, a job of `spec`, wrote
// into its checkpoint.dir. Returns its path.
inline std::string WriteCheckpoint(const v1::JobSpec& spec, const std::string& run_id,
                                   uint64_t step) {
  const std::string& dir = spec.checkpoint().dir();
  CheckpointStoreOptions options;
  options.dir = dir;
  options.job = spec.name();
  options.run_id = run_id;
  if (const auto newest = FindCheckpoint(dir); newest.ok()) options.resumed_from = newest->path;
  auto store = CheckpointStore::Open(&FileSystem::Real(), options);
  EXPECT_TRUE(store.ok()) << store.status();
  if (!store.ok()) return "";
  auto folder = (*store)->Begin(step);
  EXPECT_TRUE(folder.ok()) << folder.status();
  if (!folder.ok()) return "";
  const std::vector<float> values(64, 0.5f);
  StatePiece piece;
  piece.tensor = "head.norm";
  piece.shape = {64};
  piece.end = 64;
  piece.values = values.data();
  auto file = WriteStateFile(&FileSystem::Real(), *folder, 0, 1, {piece});
  EXPECT_TRUE(file.ok()) << file.status();
  Manifest manifest;
  manifest.run_id = run_id;
  manifest.job = spec.name();
  manifest.step = step;
  manifest.unix_ms = 1767225600000;
  manifest.world_size = 1;
  manifest.spec = spec;
  manifest.samples = 1000;
  if (file.ok()) manifest.files = {*file};
  auto path = (*store)->Complete(manifest);
  EXPECT_TRUE(path.ok()) << path.status();
  return path.ok() ? *path : "";
}

}  // namespace zeroshard::coordinator
