#include "worker/comm/tensor_group.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace zeroshard {

Event TensorGroup::BeginSum(void* x, int64_t n, DType type, const CollectiveInfo& info) {
  return last_ = line_.AllReduce(x, n, type, info, compute_.Record());
}

Event TensorGroup::BeginSumOfParts(const void* x, int64_t n, void* out, DType type,
                                   const CollectiveInfo& info) {
  ReduceScatterArgs args;
  args.input = x;
  args.type = args.output_type = type;
  args.counts.assign(static_cast<size_t>(size()), n);
  args.contributors = size();
  args.output = out;
  return last_ = line_.ReduceScatter(std::move(args), info, compute_.Record());
}

Event TensorGroup::BeginGather(void* x, int64_t n, DType type, const CollectiveInfo& info) {
  return last_ = line_.AllGather(x, n, type, info, compute_.Record());
}

Event TensorGroup::BeginSumOfCopies(void* x, int64_t n, DType type, const CollectiveInfo& info) {
  return last_of_copies_ = copies_->AllReduce(x, n, type, info, compute_.Record());
}

absl::Status TensorGroup::Sum(void* x, int64_t n, DType type, const CollectiveInfo& info) {
  return Wait(BeginSum(x, n, type, info));
}

absl::Status TensorGroup::Gather(void* x, int64_t n, DType type, const CollectiveInfo& info) {
  return Wait(BeginGather(x, n, type, info));
}

absl::Status TensorGroup::Drain() {
  const Waiting waiting(waits_, WaitKind::kRanks);
  absl::Status status = last_.Wait();
  status.Update(last_of_copies_.Wait());
  return status;
}

absl::StatusOr<TensorLines> MakeTensorLines(const MeshLine& line, int copies,
                                            const CommunicatorOptions& job, Rendezvous* rendezvous,
                                            Device* device, const CommunicatorMaker& make) {
  const int size = static_cast<int>(line.ranks.size());
  if (copies < 1 || size % copies != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "line ", line.line, " of dimension \"", line.dimension, "\": ", size, " tensor ranks, ",
        copies, " of which hold the same key and value heads; wanted a divisor of ", size));
  }
  TensorLines lines;
  absl::StatusOr<std::unique_ptr<Communicator>> made =
      MakeLineCommunicator(line, job, rendezvous, device, make);
  if (!made.ok()) return made.status();
  lines.line = *std::move(made);
  if (copies == 1) return lines;
  const int first = lines.line->rank() / copies * copies;
  const MeshLine same{.dimension = "copies",
                      .line = (line.line * size + first) / copies,
                      .ranks = {line.ranks.begin() + first, line.ranks.begin() + first + copies}};
  made = MakeLineCommunicator(same, job, rendezvous, device, make);
  if (!made.ok()) return made.status();
  lines.copies = *std::move(made);
  return lines;
}

}  // namespace zeroshard
