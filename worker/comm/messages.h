// The messages of one operation over memory that the caller owns. When it is gone the transport
// touches that memory no more.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "worker/comm/mesh.h"

namespace zeroshard {

class Messages {
 public:
  explicit Messages(Mesh& mesh) : mesh_(mesh) {}

  // Nothing is sent for zero bytes.
  absl::Status Receive(void* data, int64_t bytes, int peer, uint64_t slot) {
    if (bytes == 0) return absl::OkStatus();
    auto buffer = mesh_.Wrap(data, bytes);
    if (!buffer.ok()) return buffer.status();
    buffers_.push_back(*std::move(buffer));
    awaits_.push_back({buffers_.back().get(), peer, true, 1});
    return mesh_.PostReceive(*buffers_.back(), peer, slot, 0, bytes);
  }

  absl::Status Send(const void* data, int64_t bytes, int peer, uint64_t slot) {
    if (bytes == 0) return absl::OkStatus();
    auto index = AddSource(data, bytes, peer);
    if (!index.ok()) return index.status();
    return SendPiece(*index, slot, 0, bytes);
  }

  // For data that leaves in several messages: AddSource once, then SendPiece for each.
  absl::StatusOr<size_t> AddSource(const void* data, int64_t bytes, int peer) {
    auto buffer = mesh_.Wrap(const_cast<void*>(data), bytes);
    if (!buffer.ok()) return buffer.status();
    buffers_.push_back(*std::move(buffer));
    awaits_.push_back({buffers_.back().get(), peer, false, 0});
    return awaits_.size() - 1;
  }
  absl::Status SendPiece(size_t source, uint64_t slot, int64_t offset, int64_t bytes) {
    Await& await = awaits_[source];
    ++await.completions;
    return mesh_.PostSend(*await.buffer, await.peer, slot, offset, bytes);
  }

  absl::Status AwaitAll() { return mesh_.AwaitAll(absl::MakeSpan(awaits_)); }

 private:
  Mesh& mesh_;
  std::vector<std::unique_ptr<MessageBuffer>> buffers_;
  std::vector<Await> awaits_;
};

}  // namespace zeroshard
