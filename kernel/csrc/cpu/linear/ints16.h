// Sixteen int32 lanes, one per output of a packed block, and the dot products of bytes that fill them.
//
// All sums are exact, so every level gives the same integers. Instructions: VNNI's vpdpbusd where the level has it,
// else vpmaddubsw (unsigned x signed, pairs in int16), else plain loops. vpmaddubsw saturates above 32,767: 4-bit codes
// reach 2 * 15 * 127, and signed codes go in as |w| <= 128 with their sign moved to x, 2 * 128 * 127.
#pragma once

#include "cpu/linear/lanes16.h"

namespace radix::cpu::RK_ISA {

constexpr int kNibbleZero = 8;  // what a 4-bit code stands for 0 with, unless it has zero points

#if defined(__AVX512VNNI__)
constexpr int kSignedBias = 128;     // dot_signed() gives sums of (w + 128) x: vpdpbusd wants one unsigned operand
constexpr bool kDotsAnyByte = true;  // dot_small() takes unsigned bytes of any size
#else
constexpr int kSignedBias = 0;
constexpr bool kDotsAnyByte = false;
#endif

#if RK_ISA_LEVEL >= 2

struct Ints16 {
  __m512i v;
};
struct Bytes64 {
  __m512i v;
};
inline Ints16 no_ints() {
  return {_mm512_setzero_si512()};
}
inline Bytes64 load_bytes(const uint8_t* p) {
  return {_mm512_loadu_si512(p)};
}
inline Bytes64 low_nibbles(Bytes64 a) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))};
}
inline Bytes64 high_nibbles(Bytes64 a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// Sixteen times that.
inline Bytes64 high_halves(Bytes64 a) {
  return {_mm512_andnot_si512(_mm512_set1_epi8(15), a.v)};
}
inline Ints16 sixteenth(Ints16 a) {
  return {_mm512_srai_epi32(a.v, 4)};
}
inline __m512i add_pairs(__m512i acc, __m512i unsigned_bytes, __m512i signed_bytes) {
  const __m512i pairs = _mm512_maddubs_epi16(unsigned_bytes, signed_bytes);
  return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
// acc[n] += sum of u[4n + i] * x[i], u unsigned below 16 and x four signed bytes.
inline void dot_small(Ints16& acc, Bytes64 u, int32_t x) {
#if defined(__AVX512VNNI__)
  acc.v = _mm512_dpbusd_epi32(acc.v, u.v, _mm512_set1_epi32(x));
#else
  acc.v = add_pairs(acc.v, u.v, _mm512_set1_epi32(x));
#endif
}
inline void dot_signed(Ints16& acc, Bytes64 w, int32_t x) {
#if defined(__AVX512VNNI__)
  acc.v = _mm512_dpbusd_epi32(acc.v, _mm512_xor_si512(w.v, _mm512_set1_epi8(char(0x80))), _mm512_set1_epi32(x));
#else
  const __m512i bytes = _mm512_set1_epi32(x);
  const __m512i turned = _mm512_mask_sub_epi8(bytes, _mm512_movepi8_mask(w.v), _mm512_setzero_si512(), bytes);
  acc.v = add_pairs(acc.v, _mm512_abs_epi8(w.v), turned);
#endif
}
// acc - zero * sum, as floats.
inline Lanes16 corrected(Ints16 acc, Ints16 zero, int32_t sum) {
  Lanes16 r;
  r.part[0].v = _mm512_cvtepi32_ps(_mm512_sub_epi32(acc.v, _mm512_mullo_epi32(zero.v, _mm512_set1_epi32(sum))));
  return r;
}
// acc - by, as floats.
inline Lanes16 lowered(Ints16 acc, int32_t by) {
  Lanes16 r;
  r.part[0].v = _mm512_cvtepi32_ps(_mm512_sub_epi32(acc.v, _mm512_set1_epi32(by)));
  return r;
}
inline Ints16 load_zeros(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Lanes16 to_lanes(Ints16 a) {
  Lanes16 r;
  r.part[0].v = _mm512_cvtepi32_ps(a.v);
  return r;
}
// Values of at most 127 -> the nearest integers, even ones where two are as near, and stored as bytes.
inline Ints16 store_rounded(int8_t* to, const Lanes16& a) {
  const __m512i v = _mm512_cvtps_epi32(a.part[0].v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(v));
  return {v};
}
inline void add(Ints16& a, Ints16 b) {
  a.v = _mm512_add_epi32(a.v, b.v);
}
inline int32_t reduce_sum(Ints16 a) {
  return _mm512_reduce_add_epi32(a.v);
}
// Byte I of each lane, signed.
template <int I>
inline Lanes16 signed_lanes(Bytes64 a) {
  return to_lanes({_mm512_srai_epi32(_mm512_slli_epi32(a.v, 24 - 8 * I), 24)});
}
// Half byte I (its 4 bits from bit 4 I on) of each lane, less 8. The permutation reads the lowest four bits of its
// index.
template <int I>
inline Lanes16 nibble_lanes(Bytes64 a) {
  const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  Lanes16 r;
  r.part[0].v = _mm512_permutexvar_ps(_mm512_srli_epi32(a.v, 4 * I), table);
  return r;
}

#elif RK_ISA_LEVEL == 1

struct Ints16 {
  __m256i v[2];
};
struct Bytes64 {
  __m256i v[2];
};
inline Ints16 no_ints() {
  return {{_mm256_setzero_si256(), _mm256_setzero_si256()}};
}
inline Bytes64 load_bytes(const uint8_t* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  return {{_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)}};
}
inline Bytes64 low_nibbles(Bytes64 a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {{_mm256_and_si256(a.v[0], mask), _mm256_and_si256(a.v[1], mask)}};
}
inline Bytes64 high_nibbles(Bytes64 a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {{_mm256_and_si256(_mm256_srli_epi16(a.v[0], 4), mask), _mm256_and_si256(_mm256_srli_epi16(a.v[1], 4), mask)}};
}
// Sixteen times that.
inline Bytes64 high_halves(Bytes64 a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {{_mm256_andnot_si256(mask, a.v[0]), _mm256_andnot_si256(mask, a.v[1])}};
}
inline Ints16 sixteenth(Ints16 a) {
  return {{_mm256_srai_epi32(a.v[0], 4), _mm256_srai_epi32(a.v[1], 4)}};
}
inline __m256i add_pairs(__m256i acc, __m256i unsigned_bytes, __m256i signed_bytes) {
  const __m256i pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// acc[n] += sum of u[4n + i] * x[i], u unsigned below 16 and x four signed bytes.
inline void dot_small(Ints16& acc, Bytes64 u, int32_t x) {
  for (int i = 0; i < 2; i++) acc.v[i] = add_pairs(acc.v[i], u.v[i], _mm256_set1_epi32(x));
}
inline void dot_signed(Ints16& acc, Bytes64 w, int32_t x) {
  for (int i = 0; i < 2; i++)
    acc.v[i] = add_pairs(acc.v[i], _mm256_abs_epi8(w.v[i]), _mm256_sign_epi8(_mm256_set1_epi32(x), w.v[i]));
}
// acc - zero * sum, as floats.
inline Lanes16 corrected(Ints16 acc, Ints16 zero, int32_t sum) {
  Lanes16 r;
  for (int i = 0; i < 2; i++)
    r.part[i].v = _mm256_cvtepi32_ps(_mm256_sub_epi32(acc.v[i], _mm256_mullo_epi32(zero.v[i], _mm256_set1_epi32(sum))));
  return r;
}
// acc - by, as floats.
inline Lanes16 lowered(Ints16 acc, int32_t by) {
  Lanes16 r;
  for (int i = 0; i < 2; i++) r.part[i].v = _mm256_cvtepi32_ps(_mm256_sub_epi32(acc.v[i], _mm256_set1_epi32(by)));
  return r;
}
inline Ints16 load_zeros(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {{_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))}};
}
inline Lanes16 to_lanes(Ints16 a) {
  Lanes16 r;
  for (int i = 0; i < 2; i++) r.part[i].v = _mm256_cvtepi32_ps(a.v[i]);
  return r;
}
// Values of at most 127 -> the nearest integers, even ones where two are as near, and stored as bytes.
inline Ints16 store_rounded(int8_t* to, const Lanes16& a) {
  const Ints16 r = {{_mm256_cvtps_epi32(a.part[0].v), _mm256_cvtps_epi32(a.part[1].v)}};
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(r.v[0], r.v[1]), 0xd8);  // the packs go by halves
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  return r;
}
inline void add(Ints16& a, const Ints16& b) {
  for (int i = 0; i < 2; i++) a.v[i] = _mm256_add_epi32(a.v[i], b.v[i]);
}
inline int32_t reduce_sum(const Ints16& a) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi32(a.v[0], a.v[1]));
  int32_t sum = 0;
  for (const int32_t lane : lanes) sum += lane;
  return sum;
}
template <int I>
inline Lanes16 signed_lanes(Bytes64 a) {
  Ints16 r;
  for (int i = 0; i < 2; i++) r.v[i] = _mm256_srai_epi32(_mm256_slli_epi32(a.v[i], 24 - 8 * I), 24);
  return to_lanes(r);
}
template <int I>
inline Lanes16 nibble_lanes(Bytes64 a) {
  Ints16 r;
  for (int i = 0; i < 2; i++)
    r.v[i] = _mm256_sub_epi32(_mm256_and_si256(_mm256_srli_epi32(a.v[i], 4 * I), _mm256_set1_epi32(15)),
                              _mm256_set1_epi32(kNibbleZero));
  return to_lanes(r);
}

#else

struct Ints16 {
  int32_t v[16];
};
struct Bytes64 {
  uint8_t v[64];
};
inline Ints16 no_ints() {
  return {};
}
inline Bytes64 load_bytes(const uint8_t* p) {
  Bytes64 r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline Bytes64 low_nibbles(Bytes64 a) {
  for (uint8_t& byte : a.v) byte &= 15;
  return a;
}
inline Bytes64 high_nibbles(Bytes64 a) {
  for (uint8_t& byte : a.v) byte >>= 4;
  return a;
}
// Sixteen times that.
inline Bytes64 high_halves(Bytes64 a) {
  for (uint8_t& byte : a.v) byte &= 0xf0;
  return a;
}
inline Ints16 sixteenth(Ints16 a) {
  for (int32_t& lane : a.v) lane /= 16;  // without rest
  return a;
}
template <class Byte>
inline void dot_bytes(Ints16& acc, const Bytes64& w, int32_t x) {
  int8_t quad[4];
  std::memcpy(quad, &x, sizeof quad);
  for (int n = 0; n < 16; n++)
    for (int i = 0; i < 4; i++) acc.v[n] += static_cast<Byte>(w.v[4 * n + i]) * quad[i];
}
// acc[n] += sum of u[4n + i] * x[i], u unsigned below 16 and x four signed bytes.
inline void dot_small(Ints16& acc, const Bytes64& u, int32_t x) {
  dot_bytes<uint8_t>(acc, u, x);
}
inline void dot_signed(Ints16& acc, const Bytes64& w, int32_t x) {
  dot_bytes<int8_t>(acc, w, x);
}
inline Lanes16 to_lanes(const Ints16& a) {
  float line[16];
  for (int i = 0; i < 16; i++) line[i] = static_cast<float>(a.v[i]);
  Lanes16 r;
  r.load_line(line);
  return r;
}
// acc - zero * sum, as floats.
inline Lanes16 corrected(Ints16 acc, const Ints16& zero, int32_t sum) {
  for (int i = 0; i < 16; i++) acc.v[i] -= zero.v[i] * sum;
  return to_lanes(acc);
}
// acc - by, as floats.
inline Lanes16 lowered(Ints16 acc, int32_t by) {
  for (int32_t& lane : acc.v) lane -= by;
  return to_lanes(acc);
}
inline Ints16 load_zeros(const uint8_t* p) {
  Ints16 r;
  for (int i = 0; i < 16; i++) r.v[i] = p[i];
  return r;
}
// Values of at most 127 -> the nearest integers, even ones where two are as near, and stored as bytes.
inline Ints16 store_rounded(int8_t* to, Lanes16 a) {
  float line[16];
  for (Vec& part : a.part) part = round_nearest(part);
  a.store_line(line);
  Ints16 r;
  for (int i = 0; i < 16; i++) to[i] = static_cast<int8_t>(r.v[i] = static_cast<int32_t>(line[i]));
  return r;
}
inline void add(Ints16& a, const Ints16& b) {
  for (int i = 0; i < 16; i++) a.v[i] += b.v[i];
}
inline int32_t reduce_sum(const Ints16& a) {
  int32_t sum = 0;
  for (const int32_t lane : a.v) sum += lane;
  return sum;
}
template <int I>
inline Lanes16 signed_lanes(const Bytes64& a) {
  Ints16 r;
  for (int n = 0; n < 16; n++) r.v[n] = static_cast<int8_t>(a.v[4 * n + I]);
  return to_lanes(r);
}
template <int I>
inline Lanes16 nibble_lanes(const Bytes64& a) {
  Ints16 r;
  for (int n = 0; n < 16; n++) r.v[n] = (a.v[4 * n + I / 2] >> (I % 2 * 4) & 15) - kNibbleZero;
  return to_lanes(r);
}

#endif

}  // namespace radix::cpu::RK_ISA
