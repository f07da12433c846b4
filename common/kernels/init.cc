// InitNormal (common/kernels/init.h). Elements 4b .. 4b+3 of a tensor come from one Philox block:
// its key is the seed, its counter is b (low 64 bits) and the FNV-1a hash of the tensor's name
// (high 64 bits). Words (0, 1) give elements 0 and 1, words (2, 3) elements 2 and 3, by Box &
// Muller 1958:
//   r = sqrt(-2 ln((u + 1) / 2^32)),  r cos(2 pi w / 2^32) and r sin(2 pi w / 2^32)
// in fp64, times std, rounded to fp32. Logarithm, cosine and sine are written out below in +, *, /
// alone: the C library's differ from version to version, and ranks must agree to the bit.
#include "common/kernels/init.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>

#include "common/kernels/philox.h"

namespace zeroshard {
namespace {

uint64_t HashOf(const std::string& name) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : name) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3;
  }
  return hash;
}

// factors[k] = of(k), at compile time.
template <size_t N, class Of>
constexpr std::array<double, N> FactorsOf(Of of) {
  std::array<double, N> factors = {};
  for (size_t k = 0; k < N; ++k) factors[k] = of(static_cast<double>(k));
  return factors;
}

// ln x for a normal x: x = m 2^e with m in [1/sqrt 2, sqrt 2), ln m = 2 atanh f, f = (m-1)/(m+1).
// The series' rest is under 2 f^17 / 17 = 2e-14.
double Log(double x) {
  static constexpr auto kSeries = FactorsOf<8>([](double k) { return 1 / (2 * k + 1); });
  constexpr int64_t kRootOfHalf = std::bit_cast<int64_t>(std::numbers::sqrt2 / 2);
  const int64_t bits = std::bit_cast<int64_t>(x);
  const int64_t exponent = (bits - kRootOfHalf) >> 52;
  const double mantissa = std::bit_cast<double>(bits - exponent * (int64_t{1} << 52));
  const double f = (mantissa - 1) / (mantissa + 1);
  const double square = f * f;
  double sum = 0;
  for (size_t k = kSeries.size(); k-- > 0;) sum = sum * square + kSeries[k];
  return 2 * f * sum + static_cast<double>(exponent) * std::numbers::ln2;
}

struct Direction {
  double cosine, sine;
};

// Of 2 pi turn / 2^32: the nearest quarter turn, and the Taylor series of the rest, which is at
// most pi/4 (its remainder is under 5e-17).
Direction DirectionOf(uint32_t turn) {
  const uint32_t quarter = (turn + (uint32_t{1} << 29)) >> 30;
  const int32_t rest = static_cast<int32_t>(turn - (quarter << 30));
  const double angle = rest * (std::numbers::pi / 2147483648.0);
  const double square = angle * angle;
  // cos: 1 - s/(1*2) (1 - s/(3*4) (...)); sin / angle: 1 - s/(2*3) (1 - s/(4*5) (...)).
  static constexpr auto kCosine =
      FactorsOf<8>([](double k) { return 1 / ((2 * k + 1) * (2 * k + 2)); });
  static constexpr auto kSine =
      FactorsOf<8>([](double k) { return 1 / ((2 * k + 2) * (2 * k + 3)); });
  double cosine = 1, sine = 1;
  for (size_t k = kCosine.size(); k-- > 0;) {
    cosine = 1 - cosine * square * kCosine[k];
    sine = 1 - sine * square * kSine[k];
  }
  sine *= angle;
  // Quarter turns by table: a branch here would be mispredicted three times in four.
  static constexpr double kTurn[5] = {1, 0, -1, 0, 1};
  const double straight = kTurn[quarter & 3], crosswise = kTurn[(quarter & 3) + 1];
  return {straight * cosine + crosswise * sine, straight * sine - crosswise * cosine};
}

std::array<double, 4> NormalsOf(uint64_t seed, uint64_t hash, uint64_t block) {
  const cpu::PhiloxCounter words =
      cpu::Philox4x32({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                       static_cast<uint32_t>(hash), static_cast<uint32_t>(hash >> 32)},
                      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  std::array<double, 4> normals;
  for (size_t pair = 0; pair < 4; pair += 2) {
    const double radius = std::sqrt(-2 * Log((words[pair] + 1.0) / 4294967296.0));
    const Direction direction = DirectionOf(words[pair + 1]);
    normals[pair] = radius * direction.cosine;
    normals[pair + 1] = radius * direction.sine;
  }
  return normals;
}

}  // namespace

void InitNormal(uint64_t seed, const std::string& tensor, int64_t begin, int64_t end, float std,
                float* out) {
  const uint64_t hash = HashOf(tensor);
  for (int64_t block = begin / 4; block * 4 < end; ++block) {
    const std::array<double, 4> normals = NormalsOf(seed, hash, static_cast<uint64_t>(block));
    const int64_t first = std::max(begin, block * 4);
    const int64_t last = std::min(end, block * 4 + 4);
    for (int64_t i = first; i < last; ++i) {
      out[i - begin] = static_cast<float>(std * normals[static_cast<size_t>(i - block * 4)]);
    }
  }
}

absl::Status FreshWeights::Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                                float* out) const {
  switch (tensor.init) {
    case InitKind::kZeros:
      std::fill_n(out, end - begin, 0.0f);
      break;
    case InitKind::kOnes:
      std::fill_n(out, end - begin, 1.0f);
      break;
    case InitKind::kNormal:
      InitNormal(seed_, tensor.name, begin, end, tensor.init_std, out);
      break;
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
