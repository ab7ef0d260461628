// 4-bit floats (e2m1: a bit of sign, two of exponent, one of mantissa), which times two are the integers 0, 1, 2, 3, 4,
// 6, 8, 12 and their negatives, and powers of two in 8 bits (e8m0).
#pragma once

#include "cpu/linear/ints16.h"

namespace radix::cpu::RK_ISA {

constexpr int kFloatZero = 12;  // what raised_floats() stands for 0 with
constexpr int8_t kTwiceFloats[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// Half of the power of e8m0 code 0, as bits of a float32: that of code e from 1 on has e in place of its exponent.
constexpr int32_t kLeastPower = 0x00400000;

// Twice the floats of codes below 16, plus kFloatZero.
#if RK_ISA_LEVEL == 0
inline Bytes64 raised_floats(Bytes64 codes) {
  for (uint8_t& byte : codes.v) byte = static_cast<uint8_t>(kTwiceFloats[byte] + kFloatZero);
  return codes;
}
#else
inline __m128i raised_table() {
  return _mm_add_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kTwiceFloats)), _mm_set1_epi8(kFloatZero));
}
#if RK_ISA_LEVEL >= 2
inline Bytes64 raised_floats(Bytes64 codes) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(raised_table()), codes.v)};
}
#else
inline __m256i raised_floats(__m256i codes) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(raised_table()), codes);
}
inline Bytes64 raised_floats(Bytes64 codes) {
  return {{raised_floats(codes.v[0]), raised_floats(codes.v[1])}};
}
#endif
#endif

#if RK_ISA_LEVEL >= 2
// Half byte I of each lane as a 4-bit float, times two.
template <int I>
inline Lanes16 twice_float_lanes(Bytes64 a) {
  const __m512 table =
      _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kTwiceFloats))));
  Lanes16 r;
  r.part[0].v = _mm512_permutexvar_ps(_mm512_srli_epi32(a.v, 4 * I), table);
  return r;
}
#endif

// Half of the powers of two that 16 e8m0 codes below 255 stand for. The two least are subnormal.
inline Lanes16 half_powers(const uint8_t* codes) {
  Lanes16 powers;
#if RK_ISA_LEVEL >= 2
  const __m512i moved = _mm512_slli_epi32(load_zeros(codes).v, 23);
  powers.part[0].v = _mm512_castsi512_ps(_mm512_max_epi32(moved, _mm512_set1_epi32(kLeastPower)));
#elif RK_ISA_LEVEL == 1
  const Ints16 wide = load_zeros(codes);
  for (int i = 0; i < 2; i++) {
    const __m256i moved = _mm256_slli_epi32(wide.v[i], 23);
    powers.part[i].v = _mm256_castsi256_ps(_mm256_max_epi32(moved, _mm256_set1_epi32(kLeastPower)));
  }
#else
  float line[16];
  for (int i = 0; i < 16; i++) {
    const int32_t bits = codes[i] ? codes[i] << 23 : kLeastPower;
    std::memcpy(line + i, &bits, sizeof bits);
  }
  powers.load_line(line);
#endif
  for (Vec& part : powers.part) part = part * set1(0.5f);
  return powers;
}

}  // namespace radix::cpu::RK_ISA
