// What both ends of a bulk connection set so that frames of 1 MiB pass at the rate of the socket.
#pragma once

#include <malloc.h>

#include <string>
#include <utility>
#include <vector>

#include "grpc/impl/codegen/grpc_types.h"

namespace zeroshard::bulk {

// Frames are small whatever a transfer's size: the limit is far from both.
constexpr int kMaxMessageBytes = 4 << 20;

// Lets the process keep the memory that it receives into: glibc would give it back to the system
// and fault it in again with every frame (half of the rate). For main, before there are threads.
inline void KeepReceiveMemory() { mallopt(M_TRIM_THRESHOLD, 256 << 20); }

inline std::vector<std::pair<std::string, int>> BulkArguments() {
  return {
      // By default HTTP/2 cuts a message into frames of 16 KiB.
      {GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 2 << 20},
      // What may be on its way before it is read. Fixed: probing takes round trips and starts low.
      {GRPC_ARG_HTTP2_BDP_PROBE, 0},
      {GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20},
      // The next message is taken while the one before is still being written.
      {GRPC_ARG_HTTP2_WRITE_BUFFER_SIZE, 2 << 20},
      {GRPC_ARG_TCP_READ_CHUNK_SIZE, 256 << 10},
      {GRPC_ARG_TCP_MIN_READ_CHUNK_SIZE, 64 << 10},
      {GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, 4 << 20},
  };
}

}  // namespace zeroshard::bulk
