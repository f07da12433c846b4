// The tensor ranks that share each unit's products (architecture, section 12), as the units of one
// of them use them: collectives between what the compute stream does, which waits by events alone.
// All ranks of the group call the same methods in the same order. An error of a collective is that
// of every later one, too (communicator.h); the last one's is had by Drain.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"
#include "worker/comm/line_communicator.h"
#include "worker/comm/waiting.h"
#include "worker/device/device.h"

namespace zeroshard {

// Used by the rank's training thread; not thread-safe.
class TensorGroup {
 public:
  // All outlive it. `copies`: of the ranks that hold the same key and value heads
  // (tensor_slices.h), null where no others do. `compute`: the device's compute stream.
  TensorGroup(Communicator* line, Communicator* copies, Stream* compute)
      : line_(*line), copies_(copies), compute_(*compute) {}

  int rank() const { return line_.rank(); }
  int size() const { return line_.size(); }
  bool has_copies() const { return copies_ != nullptr; }

  // x [n] becomes its sum over the group, the same bits on all ranks: of what the compute stream
  // has written there by now. Runs beside what that stream does next, until Wait.
  Event BeginSum(void* x, int64_t n, DType type, const CollectiveInfo& info);
  // Of that sum of x [size * n] rank r gets elements [r * n, (r + 1) * n), with BeginSum's bits, in
  // `out` [n], which is x + r * n or lies apart from x. The rest of x stays.
  Event BeginSumOfParts(const void* x, int64_t n, void* out, DType type,
                        const CollectiveInfo& info);
  // The same over the ranks with the same key and value heads.
  Event BeginSumOfCopies(void* x, int64_t n, DType type, const CollectiveInfo& info);
  // Rank r's part is `n` elements at x + r * n; afterwards all parts are there.
  Event BeginGather(void* x, int64_t n, DType type, const CollectiveInfo& info);
  // What the compute stream does from now on comes after `event`. An error that is already known.
  absl::Status Wait(const Event& event) {
    const Waiting waiting(waits_, WaitKind::kRanks);
    return compute_.WaitFor(event);
  }

  // Begun and waited for.
  absl::Status Sum(void* x, int64_t n, DType type, const CollectiveInfo& info);
  absl::Status Gather(void* x, int64_t n, DType type, const CollectiveInfo& info);

  // Waits on the host for everything that was asked for; its first error.
  absl::Status Drain();

  // Told of the waits from now on; null: nobody.
  void SetWaitObserver(WaitObserver* observer) { waits_ = observer; }

 private:
  Communicator& line_;
  Communicator* const copies_;
  Stream& compute_;
  Event last_, last_of_copies_;
  WaitObserver* waits_ = nullptr;
};

// A rank's communicators along the tensor dimension.
struct TensorLines {
  std::unique_ptr<Communicator> line;
  std::unique_ptr<Communicator> copies;  // null where each rank has key and value heads of its own
};

// `line`: the rank's tensor line. `copies` neighbours of it each hold the same key and value heads
// (TensorSlice::copies of attn.k.weight); they meet under the dimension "copies". The rest and the
// errors as MakeLineCommunicator; INVALID_ARGUMENT also where `copies` does not divide the line.
absl::StatusOr<TensorLines> MakeTensorLines(const MeshLine& line, int copies,
                                            const CommunicatorOptions& job, Rendezvous* rendezvous,
                                            Device* device, const CommunicatorMaker& make);

}  // namespace zeroshard
