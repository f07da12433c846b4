// The CRC-32C of a whole from those of its parts, without its bytes.
#pragma once

#include <cstdint>

namespace zeroshard::nvme {

// The checksum of A followed by B, of `first` (A's), `second` (B's) and the length of B in bytes:
// that of A multiplied by x^(8 * length) modulo the polynomial, plus that of B (Williams, "A
// painless guide to CRC error detection algorithms", 1993: a CRC is a remainder of polynomials over
// GF(2); the inversions before and after cancel).
uint32_t CombineCrc32c(uint32_t first, uint32_t second, uint64_t second_bytes);

}  // namespace zeroshard::nvme
