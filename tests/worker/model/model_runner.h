// Runs a whole model unit by unit, as the ZeRO engine would, with everything on one rank.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "worker/device/device.h"
#include "worker/model/unit.h"
#include "worker/ops/ops.h"

namespace zeroshard {

// Memory for one unit's gradient that checks the contract of GradientSink: ranges are multiples of
// 64 inside the unit, at most two are open, parts end inside an acquired range, nothing comes
// twice.
class RecordingSink : public GradientSink {
 public:
  // `device` outlives it; null: memory of the host.
  RecordingSink(int64_t length, DType dtype, Device* device = nullptr);
  absl::StatusOr<void*> Acquire(int64_t begin, int64_t end) override;
  absl::Status Done(int64_t begin, int64_t end) override;

  // The done elements as fp32; NaN where nothing came.
  std::vector<float> Values() const;
  struct Range {
    int64_t begin, end;
    bool operator==(const Range&) const = default;
  };
  const std::vector<Range>& acquired() const { return acquired_; }
  const std::vector<Range>& done() const { return done_; }

 private:
  int64_t length_;
  DType dtype_;
  std::unique_ptr<Device> host_;  // where no device was given
  Device* device_;
  Buffer memory_;
  std::vector<bool> open_;  // by 64 elements
  std::vector<bool> final_;
  int64_t open_ranges() const;
  std::vector<Range> acquired_;
  std::vector<Range> done_;
};

struct RunOptions {
  DType dtype = DType::kF32;
  bool checkpointing = false;
  int threads = 1;
  // Both, or neither: the CPU.
  Device* device = nullptr;
  Ops* ops = nullptr;
  // Units get inputs outside their kept memory, and write gradients beside those they read.
  bool separate_buffers = false;
  std::vector<int32_t> document_start = {};  // [batch, T], or empty: not masked
  // The micro-batch's of the same names.
  bool dropout = false;
  uint64_t seed = 0;
  uint64_t step = 0;
  int64_t first_sample = 0;
  // One tensor rank, of whose slice the table and the values then are. Its group works on `device`.
  const TensorRank* slice = nullptr;
  TensorGroup* group = nullptr;
};

struct RunResult {
  double loss = 0;
  double loss_only = 0;                                 // of HeadUnit::Loss, before the backward
  std::map<std::string, std::vector<float>> gradients;  // by tensor
  std::vector<std::vector<RecordingSink::Range>> done;  // by unit
  std::vector<std::vector<float>> inputs;               // by unit: its x; of the embedding none
};

// `flat`: the parameters of each unit (fp32, rounded to options.dtype). The summed loss and its
// gradient over `batch` sequences; a tied head's gradient has the embedding's rows added, as the
// engine does at the end of a step.
absl::StatusOr<RunResult> RunModel(const ModelTable& table,
                                   const std::vector<std::vector<float>>& flat,
                                   const std::vector<int32_t>& tokens,
                                   const std::vector<int32_t>& targets, const RunOptions& options);

// Inference: the fp32 logits [tokens, V] (of a tensor rank, too) of one sequence that is fed in
// `pieces`, which add up to its length, through key/value caches of `capacity` positions. Of
// `options`, dtype, threads, device and ops.
absl::StatusOr<std::vector<float>> DecodeModel(const ModelTable& table,
                                               const std::vector<std::vector<float>>& flat,
                                               const std::vector<int32_t>& tokens,
                                               const std::vector<int64_t>& pieces, int64_t capacity,
                                               const RunOptions& options);

}  // namespace zeroshard
