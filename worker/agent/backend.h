// What a job's rank is made of. The worker builds it anew for each job, so that everything is given
// back in between; tests put their own parts in.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/exit_process.h"
#include "worker/agent/store_client.h"
#include "worker/comm/communicator.h"
#include "worker/data/dataset.h"
#include "worker/device/device.h"
#include "worker/ops/ops.h"
#include "worker/train/trainer.h"

namespace zeroshard {

// What a job asks of its kernels.
struct OpsOptions {
  bool tf32 = false;  // JobSpec.tf32
};

struct WorkerBackend {
  int threads = 1;             // of this worker's share of the host
  uint64_t device_memory = 0;  // bytes that the device has of its own; 0: it is the host
  // What jobs that must be bit-identical compare (Ops::Fingerprint), of default OpsOptions.
  std::string fingerprint;
  // As TokenDataset::Open.
  std::function<absl::StatusOr<std::unique_ptr<TokenDataset>>(
      const v1::DataSpec&, int64_t sequence, int64_t vocab_size, const DatasetOptions&)>
      open_data;
  std::function<absl::StatusOr<std::unique_ptr<Device>>()> make_device;
  // Lives no longer than the device.
  std::function<absl::StatusOr<std::unique_ptr<Ops>>(Device*, const OpsOptions&)> make_ops;
  std::function<absl::StatusOr<std::unique_ptr<Communicator>>(const CommunicatorOptions&,
                                                              Rendezvous*, Device*)>
      make_communicator;
  // Of offloaded jobs: the shard stores.
  std::function<absl::StatusOr<std::unique_ptr<StateStore>>(StoreClientOptions)> open_store;
  std::function<absl::StatusOr<std::unique_ptr<Trainer>>(const TrainerOptions&)> make_trainer;
  // For a process whose device is broken: nothing in it can mend that.
  std::function<void(const std::string& message)> exit_process = ExitProcess;
};

// `device`: cpu, cuda or cuda:N, where N counts the GPUs that CUDA_VISIBLE_DEVICES leaves.
// `collectives`: nccl, gloo or empty for what suits the device; every worker of a job has the same.
// INVALID_ARGUMENT where this build or this machine has no such device, and the device's error
// where it cannot be used.
absl::StatusOr<WorkerBackend> MakeBackend(const std::string& device, int threads,
                                          const std::string& collectives = "");

}  // namespace zeroshard
