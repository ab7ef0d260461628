// Conversions between float32, 16-bit types and FP8, two or four values a register.
#pragma once

#include <cstdint>

#include "gpu/device/fp8.h"

namespace radix::sm90 {

// Two floats, rounded to T (bf16 or f16), the first in the low half.
template <class T>
__device__ inline uint32_t round_pair(float first, float second) {
  uint32_t word;
  if constexpr (__is_same(T, bf16)) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  } else {
    static_assert(__is_same(T, f16), "16-bit floats");
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  }
  return word;
}

// Four floats, rounded to e4m3, the first in the lowest byte.
__device__ inline uint32_t round_e4m3_quad(float a, float b, float c, float d) {
  return gpu::to_e4m3_pair(a, b) | uint32_t{gpu::to_e4m3_pair(c, d)} << 16;
}

// The two e4m3 in the low (kHigh false) or high half of x, as two f16: exact.
template <bool kHigh>
__device__ inline uint32_t widen_e4m3_pair(uint32_t x) {
  uint32_t y;
  const uint16_t half = static_cast<uint16_t>(kHigh ? x >> 16 : x);
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(half));
  return y;
}

// Two E4M3 numbers, in bytes 1 and 3 of `word`, exactly as two T. bf16: their exponent and mantissa moved into place
// and the exponent's bias made up for by a product with 2^120, which mends subnormal numbers too.
template <class T>
__device__ inline uint32_t widen_odd_e4m3(uint32_t word) {
  uint32_t pair;
  if constexpr (__is_same(T, bf16)) {
    const uint32_t moved = (word >> 4 & 0x07f007f0u) | (word & 0x80008000u);
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(moved), "r"(0x7b807b80u));
  } else {
    const auto bytes = static_cast<uint16_t>(__byte_perm(word, 0, 0x4431));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(bytes));
  }
  return pair;
}

}  // namespace radix::sm90
