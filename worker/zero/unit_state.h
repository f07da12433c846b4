// What a rank holds of one unit: its parameters, optimizer state and gradients, as the policy says.
// Of an offloaded job no optimizer state, and with offload_param no parameters but of resident
// units.
// Owned by the engine; not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/state_digest.h"
#include "common/plan/tensor_slices.h"
#include "common/plan/zero_policy.h"
#include "worker/device/device.h"

namespace zeroshard {

struct UnitState {
  const UnitTable* table = nullptr;
  size_t index = 0;                   // in the model
  const TensorRank* slice = nullptr;  // whose unit this is; null: the unit is whole
  ShardLayout layout;
  int64_t own_begin = 0, own_end = 0;      // this rank's shard
  int64_t state_begin = 0, state_end = 0;  // where its optimizer state lies
  bool resident = true;                    // parameters whole, else the shard only
  bool trained = true;
  bool keeps_parameters = true;       // whole or its shard; else they are pulled for each use
  DType dtype = DType::kF32;          // of the parameters
  Rounding rounding;                  // of master weights, from element 0 of the full unit on
  DType gradient_type = DType::kF32;  // of `gradient`
  int64_t gradient_begin = 0;         // element at gradient's start

  Buffer parameters;
  Buffer master;               // fp32; empty in fp32 jobs, whose parameters are the master weights
  Buffer exp_avg, exp_avg_sq;  // fp32
  Buffer gradient;             // empty where the policy keeps none
  Buffer full_gradient;        // stage 0 with sharded accumulation: what the update reads

  // Of the owned fp32 values as the parameters were filled, where only their rounded form is kept.
  PartedDigest filled;

  // Address of an element of the flat vector; it must be held here.
  void* Parameter(int64_t element) const;
  float* Master(int64_t element) const;
  void* Gradient(int64_t element) const;
  int64_t owned() const { return own_end - own_begin; }
  // What a range of the flat vector is of the full tensors: what is keyed by elements has the same
  // keys as in one process, whatever the slice.
  std::vector<SliceRun> Runs(ElementRange range) const;
  // The fp32 values are kept: frozen 16-bit parameters have none.
  bool KeepsMaster() const { return trained || dtype == DType::kF32; }
};

// Sets parameters and master weights of [begin, begin + values.size()) of the flat vector, as far
// as they are held here; a parameter is its value rounded once to the unit's type. All of one
// tensor. Waits for the device, whose error it has.
absl::Status SetRange(UnitState* unit, int64_t begin, absl::Span<const float> values,
                      Device* device);

// Allocates everything, zeroed. `slice`, whose model `model` is, outlives the states; null: the
// model is whole. RESOURCE_EXHAUSTED from the device.
absl::StatusOr<std::vector<UnitState>> MakeUnitStates(const ModelTable& model,
                                                      const ZeroPolicy& policy, int rank,
                                                      Device* device,
                                                      const TensorRank* slice = nullptr);

}  // namespace zeroshard
