// What a job whose state lies on the stores' NVMe disks takes there, and of a store's memory. Used
// by the coordinator to place jobs and by the stores to lay out their files. Pure arithmetic;
// thread-safe.
#pragma once

#include <cstdint>

#include "common/plan/chunk_table.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// A section of a chunk is a row of blocks of this many elements (the last may have fewer); each is
// its payload, zeros to whole pages, and a page that labels it.
constexpr int64_t kNvmeBlockElements = int64_t{1} << 18;
constexpr uint32_t kNvmePage = 4096;
constexpr int kNvmeSpareSlots = 2;  // room for chunks that change while a snapshot reads them

// Buffers of one block that a job has on a store.
constexpr int kNvmeUpdateRows = 3;  // of an update at a time, five buffers each
constexpr int kNvmeUpdateBuffers = kNvmeUpdateRows * 5;
constexpr int kNvmeStagingBuffers = 8;
constexpr int kNvmeOtherBuffers = 8;  // loading, pulls, copies, the snapshot
// Buffers of one section of a chunk in fp32: parameters on their way to workers, what a snapshot
// writes, what moves to another file.
constexpr int kNvmePullSections = 3;
constexpr int kNvmeSections = kNvmePullSections + 2;

// Any part of the job is to be on the stores' disks: then all of it is.
inline bool UsesNvme(const v1::JobSpec& spec) {
  const v1::ZeroSpec& zero = spec.zero_optimization();
  return zero.offload_optimizer().device() == "nvme" || zero.offload_param().device() == "nvme";
}

// A section of `elements`, each of `element_bytes`; 0 where those are.
uint64_t NvmeSectionBytes(int64_t elements, uint32_t element_bytes);
// A chunk of `elements` of which `bytes` are kept.
uint64_t NvmeBytesOf(int64_t elements, const ChunkBytes& bytes);
// What a file takes beside its chunks, none of which has more elements: header and spare slots.
uint64_t NvmeFixedBytes(int64_t chunk_elements);
// What a job takes of the memory of each store that has chunks of it, however many.
uint64_t NvmeMemoryBytes(int64_t chunk_elements);

}  // namespace zeroshard
