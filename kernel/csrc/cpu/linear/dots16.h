// Dot products of int8 and codes of 4 to 6 bits: the codes as bytes, the products, and their sums, also times the small
// scales of groups in super-blocks. All of it is exact, so every level gives the same integers.
//
// VNNI sums four products in int32. Without it vpmaddubsw sums two in int16, which several steps can share: the small
// scale multiplies the pair of sums and adds them in one vpmaddwd.
#pragma once

#include "cpu/linear/ints16.h"

namespace radix::cpu::RK_ISA {

#if defined(__AVX512VNNI__) || RK_ISA_LEVEL == 0
constexpr bool kDotsInPairs = false;
#else
constexpr bool kDotsInPairs = true;
#endif

// How many times add_dots() may be called for sums that fit: of unsigned codes up to `largest`.
constexpr int most_dots_of(int largest) {
  return kDotsInPairs ? 32767 / (2 * largest * 127) : 8;
}
// The same of codes of `bits` bits.
constexpr int most_dots(int bits) {
  return most_dots_of((1 << bits) - 1);
}
static_assert(most_dots(4) >= 8 && most_dots(5) >= 4 && most_dots(6) >= 2, "steps that a run of codes divides into");

// The bits `mask` of each byte of a, after a shift of 16-bit words to the left (> 0) or right.
template <int Shift>
inline Bytes64 shifted_bits(Bytes64 a, uint8_t mask) {
#if RK_ISA_LEVEL >= 2
  const __m512i moved =
      Shift > 0 ? _mm512_slli_epi16(a.v, Shift > 0 ? Shift : 0) : _mm512_srli_epi16(a.v, Shift > 0 ? 0 : -Shift);
  return {_mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(mask)))};
#elif RK_ISA_LEVEL == 1
  Bytes64 r;
  for (int i = 0; i < 2; i++) {
    const __m256i moved = Shift > 0 ? _mm256_slli_epi16(a.v[i], Shift > 0 ? Shift : 0)
                                    : _mm256_srli_epi16(a.v[i], Shift > 0 ? 0 : -Shift);
    r.v[i] = _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(mask)));
  }
  return r;
#else
  for (uint8_t& byte : a.v) byte = static_cast<uint8_t>((Shift > 0 ? byte << Shift : byte >> -Shift) & mask);
  return a;
#endif
}

inline Bytes64 either(Bytes64 a, const Bytes64& b) {
#if RK_ISA_LEVEL >= 2
  a.v = _mm512_or_si512(a.v, b.v);
#elif RK_ISA_LEVEL == 1
  for (int i = 0; i < 2; i++) a.v[i] = _mm256_or_si256(a.v[i], b.v[i]);
#else
  for (int i = 0; i < 64; i++) a.v[i] |= b.v[i];
#endif
  return a;
}

// Codes whose low bits are `low`, those above from `high`, the line of them: of the four inputs number Quad of a run.
template <int Bits, int Quad>
inline Bytes64 whole_codes(Bytes64 low, const Bytes64& high) {
  if constexpr (Bits == 4) {
    return low;
  } else {
    constexpr int kWidth = Bits - 4;
    constexpr uint8_t kMask = ((1 << kWidth) - 1) << 4;
    return either(low, shifted_bits<4 - Quad * kWidth>(high, kMask));
  }
}

// The small scales of a group, as add_scaled() wants them.
struct SmallScales {
  Ints16 lanes;
};
inline SmallScales load_small_scales(const uint8_t* p) {
#if RK_ISA_LEVEL >= 2
  const __m512i lanes = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  if constexpr (!kDotsInPairs) return {{lanes}};
  return {{_mm512_mask_blend_epi16(0xaaaaaaaa, lanes, _mm512_slli_epi32(lanes, 16))}};
#elif RK_ISA_LEVEL == 1
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  SmallScales r;
  for (int i = 0; i < 2; i++) {
    const __m256i lanes = _mm256_cvtepi8_epi32(i ? _mm_srli_si128(bytes, 8) : bytes);
    r.lanes.v[i] = _mm256_blend_epi16(lanes, _mm256_slli_epi32(lanes, 16), 0xaa);
  }
  return r;
#else
  SmallScales r;
  for (int i = 0; i < 16; i++) r.lanes.v[i] = static_cast<int8_t>(p[i]);
  return r;
#endif
}

// Sums of products that small scales are still to multiply. `from`: what they begin with in every lane, which is added
// as two halves where sums are pairs: see begin_word().
inline Ints16 begin_dots([[maybe_unused]] int32_t from) {
#if defined(__AVX512VNNI__)
  return {_mm512_set1_epi32(from)};
#elif RK_ISA_LEVEL == 0
  Ints16 r;
  for (int32_t& lane : r.v) lane = from;
  return r;
#else
  return no_ints();
#endif
}
// An even number of at most 2^16 in size as begin_dots() and add_beginning() take it.
inline int32_t begin_word(int32_t value) {
  if (!kDotsInPairs) return value;
  const uint32_t half = static_cast<uint16_t>(value / 2);
  return static_cast<int32_t>(half | half << 16);
}

inline void add_dots(Ints16& acc, const Bytes64& codes, int32_t x) {
#if RK_ISA_LEVEL == 0 || defined(__AVX512VNNI__)
  dot_small(acc, codes, x);
#elif RK_ISA_LEVEL >= 2
  acc.v = _mm512_add_epi16(acc.v, _mm512_maddubs_epi16(codes.v, _mm512_set1_epi32(x)));
#else
  for (int i = 0; i < 2; i++)
    acc.v[i] = _mm256_add_epi16(acc.v[i], _mm256_maddubs_epi16(codes.v[i], _mm256_set1_epi32(x)));
#endif
}

// to += what add_dots() summed
inline void add_sums(Ints16& to, const Ints16& dots) {
#if RK_ISA_LEVEL == 0 || defined(__AVX512VNNI__)
  add(to, dots);
#elif RK_ISA_LEVEL >= 2
  to.v = _mm512_add_epi32(to.v, _mm512_madd_epi16(dots.v, _mm512_set1_epi16(1)));
#else
  for (int i = 0; i < 2; i++) to.v[i] = _mm256_add_epi32(to.v[i], _mm256_madd_epi16(dots.v[i], _mm256_set1_epi16(1)));
#endif
}

// to += dots * scales
inline void add_scaled(Ints16& to, const Ints16& dots, const SmallScales& scales) {
#if defined(__AVX512VNNI__)
  to.v = _mm512_add_epi32(to.v, _mm512_mullo_epi32(dots.v, scales.lanes.v));
#elif RK_ISA_LEVEL >= 2
  to.v = _mm512_add_epi32(to.v, _mm512_madd_epi16(dots.v, scales.lanes.v));
#elif RK_ISA_LEVEL == 1
  for (int i = 0; i < 2; i++) to.v[i] = _mm256_add_epi32(to.v[i], _mm256_madd_epi16(dots.v[i], scales.lanes.v[i]));
#else
  for (int i = 0; i < 16; i++) to.v[i] += dots.v[i] * scales.lanes.v[i];
#endif
}
// to += the number of `word` * scales, where begin_dots() leaves that to do.
inline void add_beginning([[maybe_unused]] Ints16& to, [[maybe_unused]] int32_t word,
                          [[maybe_unused]] const SmallScales& scales) {
#if RK_ISA_LEVEL >= 2 && !defined(__AVX512VNNI__)
  to.v = _mm512_add_epi32(to.v, _mm512_madd_epi16(_mm512_set1_epi32(word), scales.lanes.v));
#elif RK_ISA_LEVEL == 1
  for (int i = 0; i < 2; i++)
    to.v[i] = _mm256_add_epi32(to.v[i], _mm256_madd_epi16(_mm256_set1_epi32(word), scales.lanes.v[i]));
#endif
}

// The small minima of two groups, a pair of 16-bit numbers a lane.
struct SmallMinima {
  Ints16 pairs;
};
inline SmallMinima load_small_minima(const uint8_t* p) {
#if RK_ISA_LEVEL >= 2
  return {{_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}};
#elif RK_ISA_LEVEL == 1
  const auto* halves = reinterpret_cast<const __m128i*>(p);
  return {{{_mm256_cvtepu8_epi16(_mm_loadu_si128(halves)), _mm256_cvtepu8_epi16(_mm_loadu_si128(halves + 1))}}};
#else
  SmallMinima r;
  for (int i = 0; i < 16; i++) r.pairs.v[i] = p[2 * i] | p[2 * i + 1] << 16;
  return r;
#endif
}
// to += minima * x, the sums of x of two groups as 16-bit numbers.
inline void add_minima(Ints16& to, const SmallMinima& minima, int32_t x) {
#if defined(__AVX512VNNI__)
  to.v = _mm512_dpwssd_epi32(to.v, minima.pairs.v, _mm512_set1_epi32(x));
#elif RK_ISA_LEVEL >= 2
  to.v = _mm512_add_epi32(to.v, _mm512_madd_epi16(minima.pairs.v, _mm512_set1_epi32(x)));
#elif RK_ISA_LEVEL == 1
  for (int i = 0; i < 2; i++)
    to.v[i] = _mm256_add_epi32(to.v[i], _mm256_madd_epi16(minima.pairs.v[i], _mm256_set1_epi32(x)));
#else
  int16_t sums[2];
  std::memcpy(sums, &x, sizeof sums);
  for (int i = 0; i < 16; i++) to.v[i] += (minima.pairs.v[i] & 0xffff) * sums[0] + (minima.pairs.v[i] >> 16) * sums[1];
#endif
}

}  // namespace radix::cpu::RK_ISA
