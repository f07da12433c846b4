// What a specification says about where the state of a job lives. Pure functions of a
// specification, normalised or not; thread-safe.
#pragma once

#include <string>

#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// Whether the state of the job is in the shard stores.
inline bool IsOffloaded(const v1::JobSpec& spec) {
  const std::string& device = spec.zero_optimization().offload_optimizer().device();
  return !device.empty() && device != "none";
}

// Whether the workers also pull parameters for each use, and keep none but those of small units.
inline bool OffloadsParameters(const v1::JobSpec& spec) {
  const std::string& device = spec.zero_optimization().offload_param().device();
  return !device.empty() && device != "none";
}

// SGD with momentum, which keeps no second moment; else AdamW. Of a normalised specification.
inline bool UsesSgd(const v1::JobSpec& spec) { return spec.optimizer().type() == "SGD"; }

}  // namespace zeroshard
