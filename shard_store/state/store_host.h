// All jobs of one store: drives their controls (core/job_control.h) and their chunks (job_state.h).
// Transport-free: what arrives comes in as calls, what is to be sent goes out through a sink.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/bulk/frame.h"
#include "common/checkpoint/file_system.h"
#include "shard_store/core/job_control.h"
#include "shard_store/state/job_state.h"
#include "shard_store/state/memory_budget.h"
#include "shard_store/state/task_pool.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::store {

// Reads chunks of a job that another store holds. Made by the service, over Bulk streams.
class PeerReader {
 public:
  virtual ~PeerReader() = default;
  // fp32 elements [begin, begin + values.size()) of a chunk at `version`, within `timeout`.
  virtual absl::Status Read(const v1::StateVersion& version, uint32_t chunk, StateKind kind,
                            int64_t begin, absl::Span<float> values) = 0;
};

struct StoreHostOptions {
  uint64_t memory_limit = 0;
  std::string nvme_dir;  // empty: none
  uint64_t nvme_limit = 0;
  int threads = 1;
  FileSystem* files = nullptr;  // null: the real one
  // Called without locks held, from any thread, with the newest report of a job that has changed.
  std::function<void(const v1::StoreReport&)> on_report;
  std::function<absl::StatusOr<std::unique_ptr<PeerReader>>(const v1::StoreMap::Store& peer,
                                                            const v1::BulkHello& hello)>
      connect_peer;
};

// Thread-safe.
class StoreHost {
 public:
  explicit StoreHost(StoreHostOptions options);
  // Ends what is under way.
  ~StoreHost();

  // From the coordinator. Never waits: loading, applying and writing have threads of their own.
  void OnDirective(const v1::StoreDirective& directive);
  // Of every job here, for a coordinator that this store has just come back to.
  std::vector<v1::StoreReport> Reports() const;
  // This process was fenced: everything is forgotten, every stream ends.
  void Clear();

  // --- bulk. A stream of a rank, or of a store that copies. ---
  class Stream;  // shared: it stays valid after its generation ended, and answers errors
  // UNAVAILABLE: the generation is not open here yet; FAILED_PRECONDITION: it is over, or there is
  // no such job. `on_end` is called once, from any thread, when the store ends the stream.
  absl::StatusOr<std::shared_ptr<Stream>> Open(const v1::BulkHello& hello,
                                               std::function<void(const absl::Status&)> on_end);
  // Checks, stages and counts one kPush frame, whose payload is `parts`. What it returns goes into
  // the kAck.
  absl::Status Push(Stream* stream, const bulk::Header& header,
                    absl::Span<const absl::Span<const char>> parts);
  // Answers a kPull, now or when the chunk has that version, from any thread, once: parameters, or
  // why not (ABORTED: the generation ended). The range may be larger than a frame.
  using PullHandler = std::function<void(absl::StatusOr<PinnedParameters>)>;
  void Pull(const std::shared_ptr<Stream>& stream, const bulk::Header& header, PullHandler handler);
  // Answers a kState of at most kMaxPayload bytes.
  absl::Status State(Stream* stream, const bulk::Header& header, absl::Span<float> values);
  void Close(const std::shared_ptr<Stream>& stream);

  // --- views ---
  v1::StoreUsage usage() const;  // of all jobs
  struct Traffic {
    uint64_t pushed = 0, pulled = 0;  // bytes of payload
  };
  Traffic traffic() const;
  // Seconds that each update took since the last call.
  std::vector<double> TakeUpdateSeconds();

 private:
  struct Job;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zeroshard::store
