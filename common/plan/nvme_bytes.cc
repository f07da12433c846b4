#include "common/plan/nvme_bytes.h"

namespace zeroshard {
namespace {

uint64_t BlockBytes(uint64_t payload) {
  return (payload + kNvmePage - 1) / kNvmePage * kNvmePage + kNvmePage;
}

}  // namespace

uint64_t NvmeSectionBytes(int64_t elements, uint32_t element_bytes) {
  if (element_bytes == 0 || elements <= 0) return 0;
  const uint64_t whole = static_cast<uint64_t>(elements / kNvmeBlockElements);
  const uint64_t rest = static_cast<uint64_t>(elements % kNvmeBlockElements) * element_bytes;
  return whole * BlockBytes(static_cast<uint64_t>(kNvmeBlockElements) * element_bytes) +
         (rest == 0 ? 0 : BlockBytes(rest));
}

uint64_t NvmeBytesOf(int64_t elements, const ChunkBytes& bytes) {
  if (elements <= 0) return 0;
  uint64_t sum = 0;
  for (const uint64_t kind :
       {bytes.master, bytes.exp_avg, bytes.exp_avg_sq, bytes.parameters, bytes.staging}) {
    sum +=
        NvmeSectionBytes(elements, static_cast<uint32_t>(kind / static_cast<uint64_t>(elements)));
  }
  return sum;
}

uint64_t NvmeFixedBytes(int64_t chunk_elements) {
  return kNvmePage + 3 * uint64_t{kNvmeSpareSlots} * NvmeSectionBytes(chunk_elements, 4);
}

uint64_t NvmeMemoryBytes(int64_t chunk_elements) {
  return uint64_t{kNvmeUpdateBuffers + kNvmeStagingBuffers + kNvmeOtherBuffers} *
             BlockBytes(static_cast<uint64_t>(kNvmeBlockElements) * sizeof(float)) +
         uint64_t{kNvmeSections} * static_cast<uint64_t>(chunk_elements) * sizeof(float);
}

}  // namespace zeroshard
