#include "common/spec/offload_section.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/plan/chunk_table.h"
#include "common/plan/model_table.h"
#include "common/plan/offload.h"
#include "common/spec/checks.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

// Their product stays far from overflowing.
constexpr uint64_t kMaxBuffers = uint64_t{1} << 16;
constexpr uint64_t kMaxBufferElements = uint64_t{1} << 40;
constexpr uint64_t kMinBufferElements = 64;  // where shards are cut
constexpr uint32_t kMaxReplicas = 8;

absl::Status NormaliseDevice(absl::string_view key, uint64_t default_buffers,
                             v1::OffloadSpec* offload) {
  const std::string section = absl::StrCat("zero_optimization.", key);
  const std::string path = absl::StrCat(section, ".device");
  if (offload->device().empty()) offload->set_device("none");
  ZS_RETURN_IF_ERROR(CheckChoice(path, offload->device(), {"none", "cpu", "nvme"}));
  if (offload->device() == "none") {
    if (!offload->has_buffer_count() && !offload->has_buffer_size()) return absl::OkStatus();
    return Bad(section, offload->has_buffer_count() ? ".buffer_count" : ".buffer_size",
               ": given, but nothing is offloaded; write device: cpu beside it, or remove it");
  }
  if (!offload->has_buffer_count()) offload->set_buffer_count(default_buffers);
  if (!offload->has_buffer_size()) offload->set_buffer_size(100'000'000);
  ZS_RETURN_IF_ERROR(
      CheckCount(absl::StrCat(section, ".buffer_count"), offload->buffer_count(), 1, kMaxBuffers));
  return CheckCount(absl::StrCat(section, ".buffer_size"), offload->buffer_size(),
                    kMinBufferElements, kMaxBufferElements);
}

absl::Status NormaliseStore(v1::JobSpec* spec) {
  if (!IsOffloaded(*spec)) {
    if (!spec->has_store()) return absl::OkStatus();
    return Bad(
        "store: the section says how the shard stores hold a job's state, but this job's state is "
        "on its workers: write zero_optimization: {offload_optimizer: {device: cpu}}, or remove "
        "the section");
  }
  v1::StoreSpec* store = spec->mutable_store();
  if (store->replicas() == 0) store->set_replicas(1);
  return CheckCount("store.replicas", store->replicas(), 1, kMaxReplicas);
}

absl::Status CheckRelations(const v1::JobSpec& spec) {
  const v1::ZeroSpec& zero = spec.zero_optimization();
  if (OffloadsParameters(spec)) {
    const std::string& device = zero.offload_param().device();
    if (zero.stage() < 3) {
      return Bad("zero_optimization.offload_param.device: seen ", device, " at stage ",
                 zero.stage(),
                 ", where every worker keeps all parameters; write stage: 3, or device: none");
    }
    if (!IsOffloaded(spec)) {
      return Bad("zero_optimization.offload_param.device: seen ", device,
                 ", but parameters are in the stores only where the state that updates them is: "
                 "write offload_optimizer: {device: ",
                 device, "} too, or device: none");
    }
  }
  if (!IsOffloaded(spec)) return absl::OkStatus();
  if (zero.stage() == 0) {
    return Bad("zero_optimization.offload_optimizer.device: seen ",
               zero.offload_optimizer().device(),
               " at stage 0, where no worker owns a part of the gradients that it could send to "
               "the stores; write stage: 1, 2 or 3");
  }
  ZS_ASSIGN_OR_RETURN(const ModelTable model, MakeModelTable(spec.model()));
  if (const int64_t chunks = ChunkCount(model); chunks > kMaxChunks) {
    return Bad("zero_optimization.offload_optimizer.device: the state of this model is ", chunks,
               " chunks of ", kChunkElements,
               " elements, and the stores of a cluster hold at most ", kMaxChunks,
               " of a job; make the model smaller, or write device: none");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status NormaliseOffload(v1::JobSpec* spec) {
  v1::ZeroSpec* zero = spec->mutable_zero_optimization();
  ZS_RETURN_IF_ERROR(NormaliseDevice("offload_optimizer", 4, zero->mutable_offload_optimizer()));
  ZS_RETURN_IF_ERROR(NormaliseDevice("offload_param", 5, zero->mutable_offload_param()));
  ZS_RETURN_IF_ERROR(CheckRelations(*spec));
  return NormaliseStore(spec);
}

}  // namespace zeroshard
