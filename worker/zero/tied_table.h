// The token table of a tied model whose embedding and head are on different ranks of a pipeline:
// the first has the gradient of its rows, the last that of the head's matrix. Each sends the other
// what it owns of its own, and both add the two as a rank that has both does:
//   gradient = wire(wire(head's sum) + wire(rows' sum))
// Addition of two numbers commutes, so both ends have the same bits, and with the same state and
// update keep one table. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan/zero_policy.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"
#include "worker/ops/ops.h"
#include "worker/zero/unit_state.h"

namespace zeroshard {

class TiedTable {
 public:
  // `line`: the pipeline's, in which `peer` has the table too. `owned`: this rank's part of the
  // table, the same elements on both. All outlive this. RESOURCE_EXHAUSTED from the device.
  static absl::StatusOr<std::unique_ptr<TiedTable>> Create(const ZeroPolicy* policy,
                                                           UnitState* embedding, ElementRange owned,
                                                           Communicator* line, int peer,
                                                           Device* device, Ops* ops);
  // Waits for what is on its way.
  ~TiedTable();

  // Both ends: this rank's sum is in the unit's gradient, rounded to the wire type. What is
  // computed next sees the sum of both. The collective's errors.
  absl::Status Join(uint64_t step);

 private:
  TiedTable(const ZeroPolicy* policy, UnitState* embedding, ElementRange owned, Communicator* line,
            int peer, Device* device, Ops* ops);

  const DType wire_;
  UnitState& unit_;
  const ElementRange owned_;
  Communicator* const line_;
  const int peer_;
  Stream* const compute_;
  Ops* const ops_;
  Buffer own_;  // where the gradient is not kept in the wire type
  Buffer other_;
  Event exchanged_;
};

}  // namespace zeroshard
