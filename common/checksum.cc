#include "common/checksum.h"

#include <isa-l/crc.h>

#include <algorithm>

namespace zeroshard {

uint32_t ExtendCrc32c(uint32_t crc, const void* data, size_t bytes) {
  // ISA-L takes and gives the register before the final inversion, and counts in int.
  constexpr size_t kMost = size_t{1} << 30;
  // It only reads, but does not say so in its type.
  auto* at = static_cast<unsigned char*>(const_cast<void*>(data));
  uint32_t state = ~crc;
  while (bytes > 0) {
    const size_t n = std::min(bytes, kMost);
    state = crc32_iscsi(at, static_cast<int>(n), state);
    at += n;
    bytes -= n;
  }
  return ~state;
}

}  // namespace zeroshard
