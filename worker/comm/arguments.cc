#include "worker/comm/arguments.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace zeroshard {

absl::Status CheckSum(DType type) {
  if (IsFloat(type)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("sums are of fp32, bf16 or fp16 elements, not of ", NameOf(type)));
}

absl::Status CheckCount(const char* what, int64_t count) {
  if (count >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " is ", count, ", expected 0 or more"));
}

absl::Status CheckArgs(const ReduceScatterArgs& args, int size) {
  ZS_RETURN_IF_ERROR(CheckSum(args.type));
  if (args.output_type != DType::kF32 && args.output_type != args.type) {
    return absl::InvalidArgumentError(absl::StrCat("the output is ", NameOf(args.output_type),
                                                   ", expected fp32 or the input's ",
                                                   NameOf(args.type)));
  }
  if (static_cast<int>(args.counts.size()) != size) {
    return absl::InvalidArgumentError(
        absl::StrCat("there are ", args.counts.size(), " counts for ", size, " ranks"));
  }
  for (int64_t count : args.counts) {
    if (absl::Status status = CheckCount("a count", count); !status.ok()) return status;
  }
  if (args.contributors < 1 || args.contributors > size) {
    return absl::InvalidArgumentError(
        absl::StrCat("contributors is ", args.contributors, ", expected 1 to ", size));
  }
  return absl::OkStatus();
}

absl::Status CheckRoot(int root, int size) {
  if (root >= 0 && root < size) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("root is ", root, ", expected 0 to ", size - 1));
}

absl::Status CheckMessage(int64_t bytes, int peer, int rank, int size) {
  ZS_RETURN_IF_ERROR(CheckCount("bytes", bytes));
  if (peer >= 0 && peer < size && peer != rank) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("peer is ", peer, ", expected another of the ", size, " ranks"));
}

std::string OperationName(const char* name, const CollectiveInfo& info, int rank, int size) {
  return absl::StrCat(name, info.unit.empty() ? "" : " of ", info.unit, " (step ", info.step, ", ",
                      NameOf(info.phase), ") on rank ", rank, " of ", size);
}

absl::Status Prefixed(const std::string& what, const absl::Status& status) {
  absl::Status prefixed(status.code(), absl::StrCat(what, ": ", status.message()));
  status.ForEachPayload([&prefixed](absl::string_view key, const absl::Cord& payload) {
    prefixed.SetPayload(key, payload);
  });
  return prefixed;
}

}  // namespace zeroshard
