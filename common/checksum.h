// CRC-32C (Castagnoli; RFC 3720, appendix B.4), of files and of what travels between daemons.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zeroshard {

// The checksum of what `crc` was computed of, followed by `data`. Of nothing it is 0.
uint32_t ExtendCrc32c(uint32_t crc, const void* data, size_t bytes);
inline uint32_t Crc32c(const void* data, size_t bytes) { return ExtendCrc32c(0, data, bytes); }

}  // namespace zeroshard
