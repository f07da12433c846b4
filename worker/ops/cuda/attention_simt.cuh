// What a thread of an attention kernel can do beyond arithmetic: barriers, shuffles, asynchronous
// copies into shared memory, and tensor core products (PTX ISA 8.0, sections 9.7.8.22, 9.7.13.4.8,
// 9.7.13.4.15; sm_80 on). The kernels' bodies take this class as a parameter, so that a test can
// run them on a host under an emulation of it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda::attention {

struct DeviceSimt {
  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int64_t block() const { return blockIdx.x; }

  __device__ __forceinline__ void SyncBlock() const { __syncthreads(); }
  __device__ __forceinline__ void SyncWarp() const { __syncwarp(); }
  // x of the lane whose number differs in the bits of `bits`. All lanes of the warp take part.
  __device__ __forceinline__ float ShuffleXor(float x, int bits) const {
    return __shfl_xor_sync(0xffffffffu, x, bits);
  }

  // 16 or 4 bytes from device to shared memory, both sides aligned to as many; zeros where not
  // `valid`, and nothing is read. Complete for this thread after WaitCopies, for the block after a
  // barrier behind that.
  __device__ __forceinline__ void CopyAsync16(void* shared, const void* global, bool valid) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(Address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
                 : "memory");
  }
  __device__ __forceinline__ void CopyAsync4(void* shared, const void* global, bool valid) const {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(Address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 4 : 0)
                 : "memory");
  }
  // Ends a group of copies.
  __device__ __forceinline__ void CommitCopies() const {
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // Waits for all groups of this thread but the newest kPending.
  template <int kPending>
  __device__ __forceinline__ void WaitCopies() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  }

  // Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8,
  // and receives of matrix i the elements (l / 4, l % 4 * 2 + {0, 1}) in to[i].
  __device__ __forceinline__ void LoadMatrices(const void* row, uint32_t (&to)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(Address(row))
                 : "memory");
  }
  // The same of the transposed matrices: elements (l % 4 * 2 + {0, 1}, l / 4).
  __device__ __forceinline__ void LoadMatricesTransposed(const void* row, uint32_t (&to)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(Address(row))
                 : "memory");
  }
  // c[16, 8] += a[16, 16] * b[16, 8], elements of T (Bf16 or Fp16) into fp32.
  template <class T>
  __device__ __forceinline__ void MultiplyAdd(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                              float (&c)[4]) const {
    if constexpr (std::is_same_v<T, Fp16>) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }
  // T of both, rounded to nearest even, `low` in the lower half.
  template <class T>
  __device__ __forceinline__ uint32_t Pack(float low, float high) const {
    uint32_t packed;
    if constexpr (std::is_same_v<T, Fp16>) {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
  }
  // 2^x within two units of the last place.
  __device__ __forceinline__ float Exp2(float x) const {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

 private:
  __device__ __forceinline__ static uint32_t Address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }
};

}  // namespace zeroshard::cuda::attention
