// What the frames of a Bulk stream are done with: the seam between the transport and the chunks.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bulk/frame.h"
#include "shard_store/state/job_state.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::store {

// One stream of a rank, or of a store that copies. Its destructor closes it. The semantics and the
// errors are those of StoreHost's calls of the same names. Called by one thread at a time.
class BulkSession {
 public:
  using PullHandler = std::function<void(absl::StatusOr<PinnedParameters>)>;

  virtual ~BulkSession() = default;
  virtual absl::Status Push(const bulk::Header& header,
                            absl::Span<const absl::Span<const char>> parts) = 0;
  // After Push said TooEarly.
  virtual void WaitForPush(const bulk::Header& header,
                           std::function<void(const absl::Status&)> ready) = 0;
  virtual void Pull(const bulk::Header& header, PullHandler handler) = 0;
  virtual absl::Status State(const bulk::Header& header, absl::Span<float> values) = 0;
};

// `on_end` is called at most once, from any thread, also after the session is gone.
using OpenSession = std::function<absl::StatusOr<std::unique_ptr<BulkSession>>(
    const v1::BulkHello& hello, std::function<void(const absl::Status&)> on_end)>;

}  // namespace zeroshard::store
