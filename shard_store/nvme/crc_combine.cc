#include "shard_store/nvme/crc_combine.h"

namespace zeroshard::nvme {
namespace {

// Castagnoli's polynomial with its bits reversed: bit 31 is the coefficient of x^0.
constexpr uint32_t kPolynomial = 0x82f63b78;
constexpr uint32_t kOne = uint32_t{1} << 31;
constexpr uint32_t kX = uint32_t{1} << 30;

uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

}  // namespace

uint32_t CombineCrc32c(uint32_t first, uint32_t second, uint64_t second_bytes) {
  uint32_t power = kX, shift = kOne;
  for (int i = 0; i < 3; ++i) power = Multiply(power, power);  // x^8: a byte
  for (uint64_t n = second_bytes; n != 0; n >>= 1) {
    if (n & 1) shift = Multiply(shift, power);
    power = Multiply(power, power);
  }
  return Multiply(first, shift) ^ second;
}

}  // namespace zeroshard::nvme
