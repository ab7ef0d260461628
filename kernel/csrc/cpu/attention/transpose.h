// Transposition in registers.
#pragma once

#include "cpu/simd.h"

namespace radix::cpu::RK_ISA {

#if RK_ISA_LEVEL >= 2

// A 16 x 16 matrix of words, a register a row.
inline void transpose16(__m512i* x) {
  __m512i quad[4][4];  // quad[q][j]: in 128-bit lane l, column 4 l + j of rows 4 q .. 4 q + 3
  for (int q = 0; q < 4; q++) {
    const __m512i low01 = _mm512_unpacklo_epi32(x[4 * q], x[4 * q + 1]);
    const __m512i high01 = _mm512_unpackhi_epi32(x[4 * q], x[4 * q + 1]);
    const __m512i low23 = _mm512_unpacklo_epi32(x[4 * q + 2], x[4 * q + 3]);
    const __m512i high23 = _mm512_unpackhi_epi32(x[4 * q + 2], x[4 * q + 3]);
    quad[q][0] = _mm512_unpacklo_epi64(low01, low23);
    quad[q][1] = _mm512_unpackhi_epi64(low01, low23);
    quad[q][2] = _mm512_unpacklo_epi64(high01, high23);
    quad[q][3] = _mm512_unpackhi_epi64(high01, high23);
  }
  for (int j = 0; j < 4; j++) {
    const __m512i a = _mm512_shuffle_i32x4(quad[0][j], quad[1][j], 0x44);
    const __m512i b = _mm512_shuffle_i32x4(quad[0][j], quad[1][j], 0xee);
    const __m512i c = _mm512_shuffle_i32x4(quad[2][j], quad[3][j], 0x44);
    const __m512i d = _mm512_shuffle_i32x4(quad[2][j], quad[3][j], 0xee);
    x[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    x[4 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
    x[8 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    x[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

#endif

// A square matrix of floats, a register a row.
inline void transpose(Vec (&x)[Vec::width]) {
#if RK_ISA_LEVEL >= 2
  __m512i words[16];
  for (int i = 0; i < 16; i++) words[i] = _mm512_castps_si512(x[i].v);
  transpose16(words);
  for (int i = 0; i < 16; i++) x[i].v = _mm512_castsi512_ps(words[i]);
#elif RK_ISA_LEVEL == 1
  __m256 half[2][4];  // half[q][j]: in 128-bit lane l, column 4 l + j of rows 4 q .. 4 q + 3
  for (int q = 0; q < 2; q++) {
    const __m256 low01 = _mm256_unpacklo_ps(x[4 * q].v, x[4 * q + 1].v);
    const __m256 high01 = _mm256_unpackhi_ps(x[4 * q].v, x[4 * q + 1].v);
    const __m256 low23 = _mm256_unpacklo_ps(x[4 * q + 2].v, x[4 * q + 3].v);
    const __m256 high23 = _mm256_unpackhi_ps(x[4 * q + 2].v, x[4 * q + 3].v);
    half[q][0] = _mm256_shuffle_ps(low01, low23, 0x44);
    half[q][1] = _mm256_shuffle_ps(low01, low23, 0xee);
    half[q][2] = _mm256_shuffle_ps(high01, high23, 0x44);
    half[q][3] = _mm256_shuffle_ps(high01, high23, 0xee);
  }
  for (int j = 0; j < 4; j++) {
    x[j].v = _mm256_permute2f128_ps(half[0][j], half[1][j], 0x20);
    x[4 + j].v = _mm256_permute2f128_ps(half[0][j], half[1][j], 0x31);
  }
#else
  for (int i = 0; i < Vec::width; i++)
    for (int j = 0; j < i; j++) {
      const float t = x[i].v[j];
      x[i].v[j] = x[j].v[i];
      x[j].v[i] = t;
    }
#endif
}

}  // namespace radix::cpu::RK_ISA
