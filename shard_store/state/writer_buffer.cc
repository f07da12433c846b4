#include "shard_store/state/writer_buffer.h"

#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"

namespace zeroshard::store {

absl::StatusOr<std::shared_ptr<Buffer>> TakeWriterBuffer(size_t bytes, MemoryBudget* writing,
                                                         const std::atomic<bool>* stop,
                                                         absl::Duration patience) {
  const auto until = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(patience);
  while (true) {
    if (stop != nullptr && *stop) return absl::CancelledError("the snapshot was given up");
    if (writing->Take(bytes, "what writes a snapshot").ok())
      return Buffer::Allocate(bytes, writing);
    if (std::chrono::steady_clock::now() >= until) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "for ", absl::FormatDuration(patience), " other snapshots of this store have had all ",
          writing->limit(), " bytes for what writes them (", writing->used(), " are in use, ",
          bytes, " wanted); look for a checkpoint folder whose file system does not answer"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace zeroshard::store
