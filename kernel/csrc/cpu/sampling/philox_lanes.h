// Philox words of neighbouring blocks at once, for kIds consecutive ids.
//
// A block has 64 bits of a register: of its products of 32 x 32 bits nothing is lost, and what else stands in the high
// half of a word is ignored by the next one. Ten rounds of 2 multiplications, 2 shifts and 4 xors.
#pragma once

#include "common/philox.h"
#include "cpu/simd_math.h"

namespace radix::cpu::RK_ISA {

#if RK_ISA_LEVEL >= 1

#if RK_ISA_LEVEL >= 2
using Blocks = __m512i;
constexpr int kBlocks = 8;
inline Blocks all(uint32_t x) {
  return _mm512_set1_epi64(x);
}
inline Blocks numbered(uint32_t first) {
  return _mm512_add_epi32(all(first), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Blocks times(Blocks a, Blocks b) {
  return _mm512_mul_epu32(a, b);
}
inline Blocks high_word(Blocks a) {
  return _mm512_srli_epi64(a, 32);
}
inline Blocks mixed(Blocks a, Blocks b, Blocks c) {
  return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}
// The words a, b, c, d of every block in the order of the ids, in two registers.
inline void in_order(Blocks a, Blocks b, Blocks c, Blocks d, Blocks (&words)[2]) {
  const Blocks ab = _mm512_mask_blend_epi32(0xaaaa, a, _mm512_slli_epi64(b, 32));
  const Blocks cd = _mm512_mask_blend_epi32(0xaaaa, c, _mm512_slli_epi64(d, 32));
  const Blocks even = _mm512_unpacklo_epi64(ab, cd), odd = _mm512_unpackhi_epi64(ab, cd);
  words[0] = _mm512_permutex2var_epi64(even, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), odd);
  words[1] = _mm512_permutex2var_epi64(even, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), odd);
}
// Floor of log2(word / 256), -127 for none.
inline Vec log2_of_256th(Blocks words) {
  const __m512i bits = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srli_epi32(words, 8)));
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(127)))};
}
inline bool any_at_least(Vec a, Vec b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ) != 0;
}
inline void store_words(uint32_t* to, Blocks words) {
  _mm512_storeu_si512(to, words);
}
#else
using Blocks = __m256i;
constexpr int kBlocks = 4;
inline Blocks all(uint32_t x) {
  return _mm256_set1_epi64x(x);
}
inline Blocks numbered(uint32_t first) {
  return _mm256_add_epi32(all(first), _mm256_setr_epi64x(0, 1, 2, 3));
}
inline Blocks times(Blocks a, Blocks b) {
  return _mm256_mul_epu32(a, b);
}
inline Blocks high_word(Blocks a) {
  return _mm256_srli_epi64(a, 32);
}
inline Blocks mixed(Blocks a, Blocks b, Blocks c) {
  return _mm256_xor_si256(_mm256_xor_si256(b, c), a);
}
// The words a, b, c, d of every block in the order of the ids, in two registers.
inline void in_order(Blocks a, Blocks b, Blocks c, Blocks d, Blocks (&words)[2]) {
  const Blocks ab = _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xaa);
  const Blocks cd = _mm256_blend_epi32(c, _mm256_slli_epi64(d, 32), 0xaa);
  const Blocks even = _mm256_unpacklo_epi64(ab, cd), odd = _mm256_unpackhi_epi64(ab, cd);
  words[0] = _mm256_permute2x128_si256(even, odd, 0x20);
  words[1] = _mm256_permute2x128_si256(even, odd, 0x31);
}
// Floor of log2(word / 256), -127 for none.
inline Vec log2_of_256th(Blocks words) {
  const __m256i bits = _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_srli_epi32(words, 8)));
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127)))};
}
inline bool any_at_least(Vec a, Vec b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)) != 0;
}
inline void store_words(uint32_t* to, Blocks words) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
}
#endif

constexpr int kIds = 4 * kBlocks;
static_assert(kIds == 2 * Vec::width);

inline void philox_words(uint64_t key, uint32_t block, uint32_t c1, uint32_t c2, Blocks (&words)[2]) {
  const Blocks m0 = all(kPhiloxFactor0), m1 = all(kPhiloxFactor1);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  Blocks a = numbered(block), b = all(c1), c = all(c2), d = all(0);
#pragma GCC unroll 10
  for (int round = 0; round < 10; round++) {
    const Blocks first = times(a, m0), second = times(c, m1);
    a = mixed(high_word(second), b, all(k0));
    b = second;
    c = mixed(high_word(first), d, all(k1));
    d = first;
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  in_order(a, b, c, d, words);
}

#endif

}  // namespace radix::cpu::RK_ISA
