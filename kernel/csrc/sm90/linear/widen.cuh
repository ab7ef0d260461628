// Packed codes to operand A of a product instruction: four registers of two bf16 or f16 each (layout.cuh), exactly.
//
// clang-format off
//   u4    the code becomes the last bits of 128 (bf16) or 1024 (f16), from which 128 or 1024 plus the zero point is taken
//   e2m1  sign, exponent and mantissa move to their places, of bf16 all at once (layout.cuh); a power of two corrects the
//         exponent, subnormals included
//   s8    bf16 has seven bits behind the leading one: 128 + (code's low seven bits) - (128, or 256 if it is negative);
//         f16 has ten: 1024 + (code + 128) - 1152
// clang-format on
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "sm90/linear/layout.cuh"

namespace radix::linear {

template <class T>
constexpr bool kIsBf16 = __is_same(T, bf16);

// Whether scales go into the operand exactly: powers of two, where T holds every product with a code.
template <class T, Code kCode>
constexpr bool kFoldsScales = kCode == Code::e2m1 && kIsBf16<T>;

// One value twice.
__host__ __device__ constexpr uint32_t twice(uint32_t half) {
  return half * 0x10001u;
}

// Both halves of a - b.
template <class T>
__device__ inline uint32_t subtract_pair(uint32_t a, uint32_t b) {
  uint32_t d;
  if constexpr (kIsBf16<T>) {
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  } else {
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  }
  return d;
}
// And of a * b.
template <class T>
__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b) {
  uint32_t d;
  if constexpr (kIsBf16<T>) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  }
  return d;
}

// (value & kMask) | bits, and (value & kMask) ^ bits: one instruction each.
template <uint32_t kMask>
__device__ inline uint32_t masked_or(uint32_t value, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(value), "n"(kMask), "r"(bits));
  return d;
}
template <uint32_t kMask>
__device__ inline uint32_t masked_xor(uint32_t value, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(value), "n"(kMask), "r"(bits));
  return d;
}

// The float whose last bits a small integer becomes: 128 or 1024.
template <class T>
constexpr uint32_t kMagic = kIsBf16<T> ? 0x4300 : 0x6400;

// What is taken from a row's codes of u4, for its zero point 0 .. 16, as widen_step() wants it. Other codes have none.
template <class T>
__device__ inline uint32_t zero_pair(uint32_t zero) {
  return twice(kMagic<T> + zero);
}

template <class T, int kRegister>
__device__ inline uint32_t widen_u4(uint32_t word, uint32_t zero) {
  return subtract_pair<T>(masked_or<twice(0xf)>(word >> (4 * kRegister), twice(kMagic<T>)), zero);
}

// Register kRegister of two steps, times `factor`, a power of two that makes up for the distance of the biases as well.
template <class T, int kRegister>
__device__ inline uint32_t widen_e2m1(const E2m1Pair& pair, uint32_t factor) {
  const uint32_t word = pair.source(kRegister);
  const uint32_t placed = E2m1Pair::rotated(word, 2 * kRegister);
  if constexpr (kIsBf16<T>) {
    return multiply_pair<T>(placed & E2m1Pair::kMask, factor);
  } else {  // f16 has three bits more of mantissa
    const uint32_t size = (placed & E2m1Pair::kSize) << 3;
    return multiply_pair<T>(masked_or<E2m1Pair::kSign>(placed, size), factor);
  }
}
// The distance alone: 2^126, 2^14.
template <class T>
constexpr uint32_t kE2m1Bias = twice(kIsBf16<T> ? (126 + 127) << 7 : (14 + 15) << 10);

// Two steps, with a factor for each of the lane's rows.
template <class T>
__device__ inline void widen_scaled_e2m1(const E2m1Pair& pair, const uint32_t (&factor)[2], uint32_t (&a)[2][4]) {
  a[0][0] = widen_e2m1<T, 0>(pair, factor[0]);
  a[0][1] = widen_e2m1<T, 1>(pair, factor[1]);
  a[0][2] = widen_e2m1<T, 2>(pair, factor[0]);
  a[0][3] = widen_e2m1<T, 3>(pair, factor[1]);
  a[1][0] = widen_e2m1<T, 4>(pair, factor[0]);
  a[1][1] = widen_e2m1<T, 5>(pair, factor[1]);
  a[1][2] = widen_e2m1<T, 6>(pair, factor[0]);
  a[1][3] = widen_e2m1<T, 7>(pair, factor[1]);
}

template <class T, int kRegister>
__device__ inline uint32_t widen_s8(uint32_t word) {
  const uint32_t bytes = word >> (8 * kRegister);
  if constexpr (kIsBf16<T>) {
    const uint32_t low = masked_or<twice(0x7f)>(bytes, twice(kMagic<T>));
    const uint32_t taken = masked_or<twice(0x80)>(bytes, twice(kMagic<T>));  // 128, with the sign's bit 256
    return subtract_pair<T>(low, taken);
  } else {
    constexpr uint32_t kCounted = twice(kMagic<T> + 128);  // 1152; its last bits turn a signed byte into code + 128
    return subtract_pair<T>(masked_xor<twice(0xff)>(bytes, kCounted), kCounted);
  }
}

// Words of a lane that are a step's codes.
template <Code kCode>
constexpr int kStepWords = code_bits(kCode) / 4;

// Operand A of one step; not of e2m1.
template <class T, Code kCode>
__device__ inline void widen_step(const uint32_t (&words)[kStepWords<kCode>], const uint32_t (&zero)[2],
                                  uint32_t (&a)[4]) {
  if constexpr (kCode == Code::u4) {
    a[0] = widen_u4<T, 0>(words[0], zero[0]);
    a[1] = widen_u4<T, 1>(words[0], zero[1]);
    a[2] = widen_u4<T, 2>(words[0], zero[0]);
    a[3] = widen_u4<T, 3>(words[0], zero[1]);
  } else {
    static_assert(kCode == Code::s8);
    a[0] = widen_s8<T, 0>(words[0]);
    a[1] = widen_s8<T, 1>(words[0]);
    a[2] = widen_s8<T, 0>(words[1]);
    a[3] = widen_s8<T, 1>(words[1]);
  }
}

// Operand A of two steps, 2 i and 2 i + 1 of a tile, from the lane's words of them. zero: zero_pair() of the lane's
// rows g and g + 8, read for u4 only.
template <class T, Code kCode>
__device__ inline void widen_steps(const uint32_t (&words)[2][kStepWords<kCode>], const uint32_t (&zero)[2],
                                   uint32_t (&a)[2][4]) {
  if constexpr (kCode == Code::e2m1) {
    const uint32_t factor[2] = {kE2m1Bias<T>, kE2m1Bias<T>};
    widen_scaled_e2m1<T>({words[0][0], words[1][0]}, factor, a);
  } else {
    widen_step<T, kCode>(words[0], zero, a[0]);
    widen_step<T, kCode>(words[1], zero, a[1]);
  }
}

// Of a word of e2m1 scales, the one of row g (i: 0) or g + 8 (1) and of group `group` of its tile.
__device__ inline uint32_t e2m1_power(uint32_t word, int i, int group) {
  return __byte_perm(word, 0, 0x4440 + 2 * i + group);
}

// The power of two that an e8m0 scale, 0 .. 252, stands for.
__device__ inline float power_of_two(uint32_t exponent) {
  uint32_t bits;  // a maximum in one instruction, of which the compiler would make two
  asm("max.u32 %0, %1, %2;" : "=r"(bits) : "r"(exponent << 23), "n"(1 << 22));
  return __uint_as_float(bits);
}

}  // namespace radix::linear
