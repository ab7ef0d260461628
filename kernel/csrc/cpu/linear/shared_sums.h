// Sums of int8 x times 4-bit codes without VNNI: products of several lines of codes are added as pairs of int16 before
// they are widened.
#pragma once

#include "cpu/linear/dots16.h"
#include "cpu/linear/floats4.h"
#include "cpu/linear/layout.h"

namespace radix::cpu::RK_ISA {

// How many lines, of two products each, share sums.
template <bool Floats>
constexpr int lines_sharing() {
  constexpr int kLines = Floats ? 2 : 4;
  static_assert(2 * kLines <= most_dots_of(Floats ? 2 * kFloatZero : 15));
  return kLines;
}

#if RK_ISA_LEVEL == 1

// Sums of x and codes of eight of the outputs of a block, so that those of four rows, and what they share, stay in
// registers.
template <bool Floats, int R>
class HalfBlock {
 public:
  HalfBlock() {
    for (int r = 0; r < R; r++) sums[r] = shared_[r] = _mm256_setzero_si256();
  }

  // 8 inputs, from k on.
  void add_line(const uint8_t* line, const int8_t* const* x, int64_t k) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
    const __m256i low = factors(codes), high = factors(_mm256_srli_epi16(codes, 4));
    for (int r = 0; r < R; r++) {
      int32_t quad[2];
      std::memcpy(quad, x[r] + k, sizeof quad);
      add_dot(shared_[r], low, quad[0]);
      add_dot(shared_[r], high, quad[1]);
    }
  }
  // After each lines_sharing() lines.
  void widen() {
    for (int r = 0; r < R; r++) {
      sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(shared_[r], _mm256_set1_epi16(1)));
      shared_[r] = _mm256_setzero_si256();
    }
  }

  __m256i sums[R];

 private:
  static __m256i factors(__m256i codes) {
    const __m256i small = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    return Floats ? raised_floats(small) : small;
  }
  static void add_dot(__m256i& to, __m256i codes, int32_t x) {
    to = _mm256_add_epi16(to, _mm256_maddubs_epi16(codes, _mm256_set1_epi32(x)));
  }

  __m256i shared_[R];
};

// acc = sums over k0 <= k < k0 + size, a multiple of 32. w: B packed blocks.
template <bool Floats, int R, int B>
inline void sum_halves(const linear_layout::Quantized& q, const uint8_t* w, const int8_t* const* x, int64_t k0,
                       int64_t size, Ints16 (&acc)[R][B]) {
  using namespace linear_layout;
  constexpr int kPerLine = 8, kLines = 4;
  static_assert(kLines % lines_sharing<Floats>() == 0);
  for (int b = 0; b < B; b++) {
    for (int half = 0; half < 2; half++) {
      HalfBlock<Floats, R> found;
      for (int64_t k = k0; k < k0 + size; k += kLines * kPerLine) {
        const int64_t at = k / kPerLine * kLine;
        const int64_t ahead = q.ahead(at, B);
#pragma GCC unroll 4
        for (int i = 0; i < kLines; i++) {
          const uint8_t* line = w + b * q.block + at + i * kLine;
          if (half == 0) __builtin_prefetch(line + ahead, 0, 3);
          found.add_line(line + half * kLine / 2, x, k + i * kPerLine);
          if ((i + 1) % lines_sharing<Floats>() == 0) found.widen();
        }
      }
      for (int r = 0; r < R; r++) acc[r][b].v[half] = found.sums[r];
    }
  }
}

#endif

}  // namespace radix::cpu::RK_ISA
