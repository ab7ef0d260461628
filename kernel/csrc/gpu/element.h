// Elements on the device: conversions between storage types and float, and 16-byte vectors of them.
#pragma once

#include "common/dtype.h"
#include "gpu/compat.h"
#if !defined(__HIP__)
#include <cuda_fp16.h>
#endif

namespace radix::gpu {

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(bf16 x) {
  return __uint_as_float(uint32_t{x.bits} << 16);
}
__device__ inline float to_float(f16 x) {
#if defined(__HIP__)
  return static_cast<float>(__builtin_bit_cast(_Float16, x.bits));
#else
  return __half2float(__ushort_as_half(x.bits));
#endif
}

__device__ inline void from_float(float x, float& out) {
  out = x;
}
// Round to nearest even, NaN stays NaN (CUDA's instruction makes it 0x7fff).
__device__ inline void from_float(float x, bf16& out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
#else
  const uint32_t u = __float_as_uint(x);
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  out.bits = static_cast<uint16_t>(nan ? (u >> 16 | 0x40u) : (u + 0x7fffu + (u >> 16 & 1u)) >> 16);
#endif
}
__device__ inline void from_float(float x, f16& out) {
#if defined(__HIP__)
  out.bits = __builtin_bit_cast(uint16_t, static_cast<_Float16>(x));
#else
  out.bits = __half_as_ushort(__float2half_rn(x));
#endif
}

// N elements moved as one access; N * sizeof(T) is 16, or N is 1.
template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
  T at[N];
};

template <class T>
constexpr int kPackSize = 16 / sizeof(T);

template <int N, class T>
__device__ inline Pack<T, N> load_pack(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
// N elements, kStep an access.
template <int kStep, int N, class T>
__device__ inline void load_wide(const T* p, T (&out)[N]) {
  static_assert(N % kStep == 0);
#pragma unroll
  for (int i = 0; i < N; i += kStep) {
    const auto pack = load_pack<kStep>(p + i);
#pragma unroll
    for (int j = 0; j < kStep; j++) out[i + j] = pack.at[j];
  }
}
template <int N, class T>
__device__ inline void store_pack(T* p, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(p) = pack;
}
template <int kStep, int N, class T>
__device__ inline void store_wide(T* p, const T (&values)[N]) {
  static_assert(N % kStep == 0);
#pragma unroll
  for (int i = 0; i < N; i += kStep) {
    Pack<T, kStep> pack;
#pragma unroll
    for (int j = 0; j < kStep; j++) pack.at[j] = values[i + j];
    store_pack<kStep>(p + i, pack);
  }
}

}  // namespace radix::gpu
