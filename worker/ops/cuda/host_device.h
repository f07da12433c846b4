// What kernels and the tests of their arithmetic share: element types and vectors of them. A
// function marked ZS_HOST_DEVICE is compiled for the GPU by nvcc and for the CPU by any compiler,
// and gives the same bits on both.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/kernels/half.h"
#include "common/types.h"

#ifdef __CUDACC__
#define ZS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ZS_HOST_DEVICE inline
#endif

// Before a loop: how often the GPU's code of it is unrolled.
#ifdef __CUDA_ARCH__
#define ZS_UNROLL(times) _Pragma(ZS_TEXT(unroll times))
#define ZS_TEXT(text) #text
#else
#define ZS_UNROLL(times)
#endif

namespace zeroshard::cuda {

// The bits of an IEEE 754 fp32 number, cut off after 16.
struct Bf16 {
  uint16_t bits;
};

ZS_HOST_DEVICE uint32_t BitsOf(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

ZS_HOST_DEVICE float FromBits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

// Rounded once each.
ZS_HOST_DEVICE float Fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

ZS_HOST_DEVICE float Divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

ZS_HOST_DEVICE float SquareRoot(float value) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(value);
#else
  return std::sqrt(value);
#endif
}

// Adds to an integer that other threads add to as well; what it was before.
template <class I>
ZS_HOST_DEVICE I FetchAdd(I* to, I value) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(I) == 8) {
    return atomicAdd(reinterpret_cast<unsigned long long*>(to),
                     static_cast<unsigned long long>(value));
  } else {
    return atomicAdd(to, value);
  }
#else
  const I before = *to;
  *to = before + value;
  return before;
#endif
}

// A type of tensors in memory. Arithmetic is fp32: a further type is one more specialisation here
// and one more case in WithElement.
template <class T>
struct Element;

template <>
struct Element<float> {
  static constexpr DType kType = DType::kF32;
  static ZS_HOST_DEVICE float Widen(float value) { return value; }
  static ZS_HOST_DEVICE float Narrow(float value) { return value; }
};

template <>
struct Element<Bf16> {
  static constexpr DType kType = DType::kBF16;
  static ZS_HOST_DEVICE float Widen(Bf16 value) { return FromBits(uint32_t{value.bits} << 16); }
  // To nearest even: half a unit less one is added, plus one where the kept bit is odd. That could
  // turn a NaN into an infinity, so a NaN is cut off and made quiet instead.
  static ZS_HOST_DEVICE Bf16 Narrow(float value) {
    const uint32_t bits = BitsOf(value);
    const uint32_t rounded = bits + 0x7FFFu + (bits >> 16 & 1u);
    const uint32_t kept = value != value ? bits | 0x00400000u : rounded;
    return {static_cast<uint16_t>(kept >> 16)};
  }
};

// IEEE's conversions (PTX ISA, cvt): to nearest even, with subnormals, infinity from 65520 on. On
// the host the bits are those of half.h; a GPU's NaN may be another one.
template <>
struct Element<Fp16> {
  static constexpr DType kType = DType::kF16;
  static ZS_HOST_DEVICE float Widen(Fp16 value) {
#ifdef __CUDA_ARCH__
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
#else
    return FloatOf(value);
#endif
  }
  static ZS_HOST_DEVICE Fp16 Narrow(float value) {
#ifdef __CUDA_ARCH__
    Fp16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(value));
    return half;
#else
    return HalfOf(value);
#endif
  }
};

// f(T()) for the element type T of `type`: fp32, bf16 or fp16.
template <class F>
inline auto WithElement(DType type, const F& f) {
  if (type == DType::kBF16) return f(Bf16());
  return type == DType::kF16 ? f(Fp16()) : f(float());
}

// value as `type` (fp32, bf16 or fp16) holds it.
ZS_HOST_DEVICE float Rounded(float value, DType type) {
  if (type == DType::kBF16) return Element<Bf16>::Widen(Element<Bf16>::Narrow(value));
  if (type == DType::kF16) return Element<Fp16>::Widen(Element<Fp16>::Narrow(value));
  return value;
}

// Elements that a thread takes at a time where memory is aligned: whole 16-byte words of any type.
inline constexpr int kPack = 8;

// 16 bytes that are read and written by one instruction.
struct alignas(16) Word {
  uint32_t parts[4];
};

ZS_HOST_DEVICE Word LoadWord(const void* p) {
#ifdef __CUDA_ARCH__
  const uint4 word = *static_cast<const uint4*>(p);
  return {{word.x, word.y, word.z, word.w}};
#else
  Word word;
  std::memcpy(&word, p, sizeof(word));
  return word;
#endif
}

ZS_HOST_DEVICE void StoreWord(const Word& word, void* p) {
#ifdef __CUDA_ARCH__
  *static_cast<uint4*>(p) = make_uint4(word.parts[0], word.parts[1], word.parts[2], word.parts[3]);
#else
  std::memcpy(p, &word, sizeof(word));
#endif
}

// N elements from p on, N either 1 or kPack; with kPack, p is a multiple of 16 bytes.
template <int N>
ZS_HOST_DEVICE void Load(const float* p, float* values) {
  static_assert(N == 1 || N == kPack);
  if constexpr (N == 1) {
    values[0] = *p;
  } else {
    for (int w = 0; w < 2; ++w) {
      const Word word = LoadWord(p + 4 * w);
      for (int k = 0; k < 4; ++k) values[4 * w + k] = FromBits(word.parts[k]);
    }
  }
}

template <int N>
ZS_HOST_DEVICE void Store(const float* values, float* p) {
  static_assert(N == 1 || N == kPack);
  if constexpr (N == 1) {
    *p = values[0];
  } else {
    for (int w = 0; w < 2; ++w) {
      Word word;
      for (int k = 0; k < 4; ++k) word.parts[k] = BitsOf(values[4 * w + k]);
      StoreWord(word, p + 4 * w);
    }
  }
}

// Types of two bytes.
template <int N, class T>
ZS_HOST_DEVICE void Load(const T* p, float* values) {
  static_assert(sizeof(T) == 2 && (N == 1 || N == kPack));
  if constexpr (N == 1) {
    values[0] = Element<T>::Widen(*p);
  } else {
    const Word word = LoadWord(p);
    for (int k = 0; k < 4; ++k) {
      values[2 * k] = Element<T>::Widen({static_cast<uint16_t>(word.parts[k])});
      values[2 * k + 1] = Element<T>::Widen({static_cast<uint16_t>(word.parts[k] >> 16)});
    }
  }
}

template <int N, class T>
ZS_HOST_DEVICE void Store(const float* values, T* p) {
  static_assert(sizeof(T) == 2 && (N == 1 || N == kPack));
  if constexpr (N == 1) {
    *p = Element<T>::Narrow(values[0]);
  } else {
    Word word;
    for (int k = 0; k < 4; ++k) {
      const uint32_t low = Element<T>::Narrow(values[2 * k]).bits;
      const uint32_t high = Element<T>::Narrow(values[2 * k + 1]).bits;
      word.parts[k] = low | high << 16;
    }
    StoreWord(word, p);
  }
}

// N elements, bit by bit; N and alignment as for Load.
template <int N, class T>
ZS_HOST_DEVICE void CopyElements(const T* from, T* to) {
  static_assert(N == 1 || N == kPack);
  if constexpr (N == 1) {
    *to = *from;
  } else {
    constexpr int kInWord = static_cast<int>(sizeof(Word) / sizeof(T));
    for (int i = 0; i < N; i += kInWord) StoreWord(LoadWord(from + i), to + i);
  }
}

}  // namespace zeroshard::cuda
