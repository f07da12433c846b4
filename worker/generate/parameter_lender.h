// Who lends a generator the parameters of one unit after another: a model that is whole in memory,
// or the ZeRO engine, which gathers each unit and releases it.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard {

struct LentParameters {
  const void* own = nullptr;      // the unit's flat vector, compute type
  const void* lm_head = nullptr;  // head only: [V, C]
};

class ParameterLender {
 public:
  virtual ~ParameterLender() = default;
  // Every pass over the model begins with this and then borrows every unit once, in order, the
  // head included, each given back before the next is borrowed: the same calls whatever the
  // tokens.
  virtual absl::Status BeginPass() { return absl::OkStatus(); }
  // Valid until GiveBack of the same unit.
  virtual absl::StatusOr<LentParameters> Borrow(int unit) = 0;
  virtual absl::Status GiveBack(int unit) = 0;
};

}  // namespace zeroshard
