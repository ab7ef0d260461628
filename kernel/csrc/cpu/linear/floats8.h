// 8-bit floats (e4m3) as wider ones, exactly: less their sign they are the upper bits of a float16 whose exponent has
// another bias, so that what they become is a 256th of them, subnormal or not. Codes lie in lines of bytes16. None is a
// NaN: packing refuses those.
//
// The instructions ignore that a float16 is subnormal, whatever the modes of the caller.
#pragma once

#include "cpu/float8.h"
#include "cpu/linear/ints16.h"

namespace radix::cpu::RK_ISA {

constexpr float kFloat8Unit = 256;  // what a widened code is to be multiplied by

// The codes of input I of a line's four.
template <int I>
inline Lanes16 float8_lanes(const Bytes64& line) {
  static_assert(I >= 0 && I < 4);
  Lanes16 r;
#if RK_ISA_LEVEL >= 2
  const __m512i high = I % 2 ? line.v : _mm512_slli_epi16(line.v, 8);
  const __m512i halves = _mm512_and_si512(_mm512_srai_epi16(high, 1), _mm512_set1_epi16(static_cast<short>(0xbf80)));
  r.part[0].v = _mm512_cvtph_ps(I < 2 ? _mm512_castsi512_si256(halves) : _mm512_extracti64x4_epi64(halves, 1));
#elif RK_ISA_LEVEL == 1
  const __m256i high = I % 2 ? line.v[I / 2] : _mm256_slli_epi16(line.v[I / 2], 8);
  const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  r.part[0].v = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  r.part[1].v = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#else
  const auto& values = e4m3_values();
  float lanes[16];
  for (int n = 0; n < 16; n++) lanes[n] = values[line.v[I / 2 * 32 + 2 * n + I % 2]] / kFloat8Unit;
  r.load_line(lanes);
#endif
  return r;
}

// What sums of products with widened codes stand for.
inline void restore_float8(Lanes16& sums) {
  for (Vec& part : sums.part) part = part * set1(kFloat8Unit);
}

#if defined(__AVX512BF16__)
// The codes of two inputs, 32 bytes, as a line of pairs16.
inline __m512i float8_pairs(const uint8_t* codes) {
  // bfloat16s of a 256th of 0 to 7 times 2^-9, the subnormal ones.
  const __m512i small =
      _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860));
  const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m512i shifted = _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(0x07f0));
  const __m512i normal = _mm512_add_epi16(shifted, _mm512_set1_epi16(0x3800));
  const __mmask32 subnormal = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
  const __m512i size = _mm512_mask_permutexvar_epi16(normal, subnormal, code, small);
  constexpr int kOrOfAnd = 0xf8;  // a | (b & c)
  return _mm512_ternarylogic_epi32(size, _mm512_slli_epi16(code, 8), _mm512_set1_epi16(static_cast<short>(0x8000)),
                                   kOrOfAnd);
}
#endif

}  // namespace radix::cpu::RK_ISA
