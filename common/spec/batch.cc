#include "common/spec/batch.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/plan/job_mesh.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMaxBatch = (uint64_t{1} << 31) - 1;
constexpr uint64_t kMaxMicroBatch = 65536;

absl::Status Bad(const std::string& message) { return absl::InvalidArgumentError(message); }

absl::Status CheckRange(absl::string_view key, bool given, uint64_t seen, uint64_t high) {
  if (!given || (seen >= 1 && seen <= high)) return absl::OkStatus();
  return Bad(absl::StrCat(key, ": seen ", seen, ", wanted a whole number from 1 to ", high));
}

// "resources.workers 4"; of a mesh also what is divided by.
std::string NameOfRanks(const v1::JobSpec& spec, uint64_t ranks) {
  if (ranks == spec.resources().workers()) return absl::StrCat("resources.workers ", ranks);
  return absl::StrCat(ranks, " data-parallel ranks (resources.workers ", spec.resources().workers(),
                      " / (parallel.tensor ", spec.parallel().tensor(), " x parallel.pipeline ",
                      spec.parallel().pipeline(), "))");
}

}  // namespace

absl::Status NormaliseBatch(v1::JobSpec* spec) {
  // Data-parallel ranks: what a DeepSpeed job of one model replica a GPU calls its world size.
  const auto workers = spec->resources().workers() / static_cast<uint64_t>(RanksOfReplica(*spec));
  const std::string named = NameOfRanks(*spec, workers);
  const bool has_global = spec->has_train_batch_size();
  const bool has_micro = spec->has_train_micro_batch_size_per_gpu();
  const bool has_accumulation = spec->has_gradient_accumulation_steps();
  uint64_t global = spec->train_batch_size();
  uint64_t micro = spec->train_micro_batch_size_per_gpu();
  uint64_t accumulation = spec->gradient_accumulation_steps();

  if (absl::Status status = CheckRange("train_batch_size", has_global, global, kMaxBatch);
      !status.ok()) {
    return status;
  }
  if (absl::Status status =
          CheckRange("train_micro_batch_size_per_gpu", has_micro, micro, kMaxMicroBatch);
      !status.ok()) {
    return status;
  }
  if (absl::Status status =
          CheckRange("gradient_accumulation_steps", has_accumulation, accumulation, kMaxBatch);
      !status.ok()) {
    return status;
  }

  if (has_global && has_micro) {
    if (global % micro != 0) {
      return Bad(absl::StrCat("train_batch_size: seen ", global,
                              ", wanted a multiple of train_micro_batch_size_per_gpu, which is ",
                              micro));
    }
    const uint64_t rounds = (global / micro + workers - 1) / workers;
    if (has_accumulation && accumulation != rounds) {
      return Bad(absl::StrCat("gradient_accumulation_steps: seen ", accumulation, ", wanted ",
                              rounds, " = train_batch_size ", global,
                              " / (train_micro_batch_size_per_gpu ", micro, " * ", named, ")",
                              global % (micro * workers) ? " rounded up" : "",
                              "; give two of the three and leave the third out"));
    }
    accumulation = rounds;
  } else if (has_global) {
    if (!has_accumulation) accumulation = 1;
    const uint64_t share = accumulation * workers;
    if (global % share != 0) {
      return Bad(absl::StrCat("train_batch_size: seen ", global,
                              ", wanted a multiple of gradient_accumulation_steps ", accumulation,
                              " * ", named,
                              "; or give train_micro_batch_size_per_gpu, which need only divide "
                              "train_batch_size"));
    }
    micro = global / share;
    if (micro > kMaxMicroBatch) {
      return Bad(absl::StrCat(
          "train_batch_size: seen ", global, ", which over ", workers,
          workers == spec->resources().workers() ? " workers makes" : " data-parallel ranks makes",
          " micro-batches of ", micro, ", wanted at most ", kMaxMicroBatch,
          "; give train_micro_batch_size_per_gpu"));
    }
  } else if (has_micro) {
    if (!has_accumulation) accumulation = 1;
    // Each factor is below 2^31 here, so two multiply without overflow; divide for the third.
    if (accumulation > kMaxBatch / (micro * workers)) {
      return Bad(absl::StrCat("train_micro_batch_size_per_gpu: ", micro,
                              " * gradient_accumulation_steps ", accumulation, " * ", named,
                              " is more than ", kMaxBatch));
    }
    global = micro * accumulation * workers;
  } else {
    return Bad(
        "train_batch_size: missing; give train_batch_size or train_micro_batch_size_per_gpu, for "
        "example train_batch_size: 32 and train_micro_batch_size_per_gpu: 8");
  }

  const uint64_t sequence = spec->model().sequence_length();
  if (sequence != 0 && micro > kMaxBatch / sequence) {
    return Bad(absl::StrCat("train_micro_batch_size_per_gpu: seen ", micro,
                            ", wanted at most 2^31-1 tokens, with model.sequence_length ", sequence,
                            " at most ", kMaxBatch / sequence));
  }
  spec->set_train_batch_size(global);
  spec->set_train_micro_batch_size_per_gpu(micro);
  spec->set_gradient_accumulation_steps(accumulation);
  return absl::OkStatus();
}

}  // namespace zeroshard
