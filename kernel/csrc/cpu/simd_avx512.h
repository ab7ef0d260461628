// Vec on AVX-512 (F, BW, DQ, VL): 16 floats, masked tails. The levels above use it too.
#pragma once

#include <immintrin.h>

#include "cpu/simd_scalar.h"

namespace radix::cpu::RK_ISA {

struct Vec {
  static constexpr int width = 16;
  __m512 v;
};
struct Mask {
  __mmask16 m;
};

inline Vec zero() {
  return {_mm512_setzero_ps()};
}
inline Vec set1(float x) {
  return {_mm512_set1_ps(x)};
}

inline __mmask16 lanes_below(int n) {
  return static_cast<__mmask16>((1u << n) - 1u);  // 0 <= n <= 16
}
inline __m512 widen(__m256i x, bf16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline __m512 widen(__m256i x, f16) {
  return _mm512_cvtph_ps(x);
}
// In integers and not vcvtneps2bf16, which flushes subnormals.
inline __m256i narrow(__m512 x, bf16) {
  const __m512i u = _mm512_castps_si512(x), high = _mm512_srli_epi32(u, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40)));
}
inline __m256i narrow(__m512 x, f16) {
  return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Vec load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
inline Vec load(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(lanes_below(n), p)};
}
template <class T>
inline Vec load(const T* p) {
  return {widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{})};
}
inline Vec load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
template <class T>
inline Vec load(const T* p, int n) {
  return {widen(_mm256_maskz_loadu_epi16(lanes_below(n), p), T{})};
}
inline void store(float* p, Vec a) {
  _mm512_storeu_ps(p, a.v);
}
inline void store(float* p, Vec a, int n) {
  _mm512_mask_storeu_ps(p, lanes_below(n), a.v);
}
template <class T>
inline void store(T* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a.v, T{}));
}
template <class T>
inline void store(T* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, lanes_below(n), narrow(a.v, T{}));
}

inline Vec operator+(Vec a, Vec b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline Vec operator-(Vec a, Vec b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
inline Vec operator*(Vec a, Vec b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
inline Vec operator/(Vec a, Vec b) {
  return {_mm512_div_ps(a.v, b.v)};
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline Vec fnma(Vec a, Vec b, Vec c) {
  return {_mm512_fnmadd_ps(a.v, b.v, c.v)};
}
inline Vec max(Vec a, Vec b) {
  return {_mm512_max_ps(a.v, b.v)};
}
inline Vec min(Vec a, Vec b) {
  return {_mm512_min_ps(a.v, b.v)};
}
inline Vec abs(Vec a) {
  return {_mm512_abs_ps(a.v)};
}
inline Vec copysign(Vec magnitude, Vec sign) {
  const __m512 bit = _mm512_set1_ps(-0.f);
  return {_mm512_or_ps(_mm512_andnot_ps(bit, magnitude.v), _mm512_and_ps(bit, sign.v))};
}
inline Vec round_nearest(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec scale2(Vec a, Vec n) {
  return {_mm512_scalef_ps(a.v, n.v)};
}
// Swaps lanes 2i and 2i + 1.
inline Vec swap_pairs(Vec a) {
  return {_mm512_permute_ps(a.v, 0xB1)};
}
inline Mask lt(Vec a, Vec b) {
  return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)};
}
inline Mask bit_mask(uint32_t bits) {
  return {static_cast<__mmask16>(bits)};
}
inline Vec select(Mask m, Vec a, Vec b) {
  return {_mm512_mask_blend_ps(m.m, b.v, a.v)};
}

inline float reduce_sum(Vec a) {
  const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
// out[0..3]: the sums of a, b, c and d.
inline void store_sums(float* out, Vec a, Vec b, Vec c, Vec d) {
  const auto half = [](Vec v) { return _mm256_add_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1)); };
  const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(half(a), half(b)), _mm256_hadd_ps(half(c), half(d)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
inline float reduce_max(Vec a) {
  const __m256 x = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

}  // namespace radix::cpu::RK_ISA
