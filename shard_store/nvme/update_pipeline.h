// One optimizer step over chunks that lie in a file, in rows of 2^18 elements: staging and state
// are read ahead, computed on by the caller's threads, written behind, all at the same time and
// with as many rows in memory as the buffers allow. No thread waits.
//
// Of chunks that a snapshot preserves the new version goes elsewhere (ChunkFile::BeginUpdate);
// where there is no room left for it, reading ahead stops until the snapshot has come by.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shard_store/nvme/buffers.h"
#include "shard_store/nvme/chunk_file.h"

namespace zeroshard::nvme {

// A row in memory. Pointers are aligned to 4096 bytes and overlap nowhere; null where the job keeps
// no such thing (parameters: fp32 jobs; exp_avg_sq: SGD).
struct UpdateRow {
  uint32_t chunk = 0;
  int64_t begin = 0, end = 0;      // elements of the chunk
  const void* gradient = nullptr;  // of the wire type
  float* master = nullptr;         // read and written, as the moments
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  void* parameters = nullptr;  // 16 bits an element, written
};

struct UpdateOptions {
  std::shared_ptr<ChunkFile> file;
  std::shared_ptr<BufferPool> pool;           // kBuffersPerRow for each row; nobody else's
  std::vector<uint32_t> chunks;               // trained ones, each once, in the order wanted
  uint64_t from_version = 0, to_version = 0;  // what was staged is of `to_version`
  // Rows of one chunk may be computed at the same time, and in any order.
  std::function<absl::Status(const UpdateRow&)> compute;
  // Runs a task on a thread that computes; tasks never wait.
  std::function<void(std::function<void()>)> execute;
  // Each chunk whose new version is written and may be read. Through `execute`; optional.
  std::function<void(uint32_t chunk)> on_chunk;
  // Once, through `execute`, after everything else: OK, or the first error. Nothing is on its way
  // any more then, and nothing holds `file` or `pool`; the file's chunks are of mixed versions, fit
  // for nothing, after an error.
  std::function<void(const absl::Status&)> done;
};

constexpr int kBuffersPerRow = 5;
// With fewer, reading, computing and writing would wait for each other.
constexpr int kLeastRows = 2;

// INVALID_ARGUMENT: a pool of less than kLeastRows rows, missing functions, chunks that are not
// here, frozen or named twice. Else returns at once and calls `done` later.
absl::Status StartUpdate(UpdateOptions options);

}  // namespace zeroshard::nvme
