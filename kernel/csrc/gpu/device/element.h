// Elements on the device: conversions between storage types and float, and 16-byte vectors of them.
#pragma once

#include <cstring>

#include "common/dtype.h"
#include "gpu/device/compat.h"
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
// As to_float() of each; of two bf16 in a word the upper one takes one instruction. Not on AMD: from these words LLVM
// 19 makes 16-bit shifts in vectors whose unused half it then does not mask off, so that the sign of an element gets
// into its neighbour.
template <int N, class T>
__device__ inline void widen_pack(const Pack<T, N>& pack, float (&out)[N]) {
#if !defined(__HIP__)
  if constexpr (__is_same(T, bf16) && N % 2 == 0) {
    uint32_t words[N / 2];
    memcpy(words, &pack, sizeof(words));
#pragma unroll
    for (int i = 0; i < N; i++) out[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < N; i++) out[i] = to_float(pack.at[i]);
}
// As from_float() of each, but two 16-bit results by one instruction where there is one.
template <int N, class T>
__device__ inline Pack<T, N> round_pack(const float (&x)[N]) {
  Pack<T, N> result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    uint32_t words[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      if constexpr (__is_same(T, bf16)) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
      } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
      }
    }
    memcpy(&result, words, sizeof(result));
    return result;
  }
#endif
#pragma unroll
  for (int i = 0; i < N; i++) from_float(x[i], result.at[i]);
  return result;
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
