// Vec on AVX2 with FMA and F16C: 8 floats.
#pragma once

#include <immintrin.h>

#include "cpu/simd_scalar.h"

namespace radix::cpu::RK_ISA {

struct Vec {
  static constexpr int width = 8;
  __m256 v;
};
struct Mask {
  __m256 m;
};

inline Vec zero() {
  return {_mm256_setzero_ps()};
}
inline Vec set1(float x) {
  return {_mm256_set1_ps(x)};
}

inline __m256i lanes_below(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline __m256 widen(__m128i x, bf16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline __m256 widen(__m128i x, f16) {
  return _mm256_cvtph_ps(x);
}
inline __m128i narrow(__m256 x, bf16) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i word = _mm256_blendv_epi8(rounded, quiet, nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(word), _mm256_extracti128_si256(word, 1));
}
inline __m128i narrow(__m256 x, f16) {
  return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Vec load(const float* p) {
  return {_mm256_loadu_ps(p)};
}
inline Vec load(const float* p, int n) {
  return {_mm256_maskload_ps(p, lanes_below(n))};
}
template <class T>
inline Vec load(const T* p) {
  return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T{})};
}
inline Vec load(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
template <class T>
inline Vec load(const T* p, int n) {
  T lanes[Vec::width] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(T));
  return load(lanes);
}
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.v);
}
inline void store(float* p, Vec a, int n) {
  _mm256_maskstore_ps(p, lanes_below(n), a.v);
}
template <class T>
inline void store(T* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(a.v, T{}));
}
template <class T>
inline void store(T* p, Vec a, int n) {
  T lanes[Vec::width];
  store(lanes, a);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(T));
}

inline Vec operator+(Vec a, Vec b) {
  return {_mm256_add_ps(a.v, b.v)};
}
inline Vec operator-(Vec a, Vec b) {
  return {_mm256_sub_ps(a.v, b.v)};
}
inline Vec operator*(Vec a, Vec b) {
  return {_mm256_mul_ps(a.v, b.v)};
}
inline Vec operator/(Vec a, Vec b) {
  return {_mm256_div_ps(a.v, b.v)};
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
inline Vec fnma(Vec a, Vec b, Vec c) {
  return {_mm256_fnmadd_ps(a.v, b.v, c.v)};
}
inline Vec max(Vec a, Vec b) {
  return {_mm256_max_ps(a.v, b.v)};
}
inline Vec min(Vec a, Vec b) {
  return {_mm256_min_ps(a.v, b.v)};
}
inline Vec abs(Vec a) {
  return {_mm256_andnot_ps(_mm256_set1_ps(-0.f), a.v)};
}
inline Vec copysign(Vec magnitude, Vec sign) {
  const __m256 bit = _mm256_set1_ps(-0.f);
  return {_mm256_or_ps(_mm256_andnot_ps(bit, magnitude.v), _mm256_and_ps(bit, sign.v))};
}
inline Vec round_nearest(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline __m256 power2(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// n within [-252, 254]; two factors, so that results in the subnormal range come out rounded.
inline Vec scale2(Vec a, Vec n) {
  const __m256i k = _mm256_cvtps_epi32(n.v), half = _mm256_srai_epi32(k, 1);
  return {_mm256_mul_ps(_mm256_mul_ps(a.v, power2(half)), power2(_mm256_sub_epi32(k, half)))};
}
// Swaps lanes 2i and 2i + 1.
inline Vec swap_pairs(Vec a) {
  return {_mm256_permute_ps(a.v, 0xB1)};
}
inline Mask lt(Vec a, Vec b) {
  return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)};
}
inline Mask bit_mask(uint32_t bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int32_t>(bits)), lane);
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane))};
}
inline Vec select(Mask m, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.v, a.v, m.m)};
}

inline float reduce_sum(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
// out[0..3]: the sums of a, b, c and d.
inline void store_sums(float* out, Vec a, Vec b, Vec c, Vec d) {
  const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
inline float reduce_max(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

}  // namespace radix::cpu::RK_ISA
