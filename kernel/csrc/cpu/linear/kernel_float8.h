// The product of bfloat16 x with FP8 weights by AVX-512-BF16's dot product of pairs, for machines that have it but no
// AMX, at every M: codes become bfloat16 pairs, of few rows in registers. Within a group an accumulator takes the pairs
// in ascending k; then sum += accumulator * scale, groups ascending. The instruction treats subnormal operands and sums
// as zero.
#pragma once

#if defined(__AVX512BF16__)

#include "cpu/linear/kernel_codes.h"

namespace radix::cpu::RK_ISA {

// acc += the pairs of each block times inputs k and k + 1.
template <int R, int B>
inline void add_pairs_of(const __m512bh (&line)[B], const bf16* const (&x)[R], int64_t k, Lanes16 (&acc)[R][B]) {
  for (int r = 0; r < R; r++) {
    int32_t pair;
    std::memcpy(&pair, x[r] + k, sizeof pair);
    const __m512bh value = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
    for (int b = 0; b < B; b++) acc[r][b].part[0].v = _mm512_dpbf16_ps(acc[r][b].part[0].v, line[b], value);
  }
}

// The same, of codes.
template <int R, int B>
inline void float8_dots(const uint8_t* const (&codes)[B], const bf16* const (&x)[R], int64_t k, Lanes16 (&acc)[R][B]) {
  __m512bh line[B];
  for (int b = 0; b < B; b++) line[b] = reinterpret_cast<__m512bh>(float8_pairs(codes[b]));
  add_pairs_of<R, B>(line, x, k, acc);
}

template <int R, int B>
inline void float8_tile(const Quantized& q, const StagedX& staged, int64_t m, const uint8_t* w, float* sums) {
  constexpr int64_t kLineK = kLine / kBlockN;
  const bf16* x[R];
  for (int r = 0; r < R; r++) x[r] = reinterpret_cast<const bf16*>(staged.at(m + r, 0));
  for (int64_t g = 0; g < q.groups; g++) {
    Lanes16 acc[R][B];
    clear(acc);
    for (int64_t k = g * q.group; k < (g + 1) * q.group; k += kLineK) {
      const int64_t at = k * kBlockN, ahead = q.ahead(at, B);
      const uint8_t *first[B], *second[B];
      for (int b = 0; b < B; b++) {
        first[b] = w + b * q.block + at;
        second[b] = first[b] + kLine / 2;
        __builtin_prefetch(first[b] + ahead, 0, 3);
      }
      float8_dots(first, x, k, acc);
      float8_dots(second, x, k + 2, acc);
    }
    fetch_numbers<B>(q, w, g);
    for (int b = 0; b < B; b++) {
      const Lanes16 scale = load_scales(w + b * q.block + q.scales, g * kBlockN, q.scale_type);
      for (int r = 0; r < R; r++) {
        restore_float8(acc[r][b]);
        add_scaled(sums + (r * kCodeBlocks + b) * kBlockN, acc[r][b], scale, g == 0);
      }
    }
  }
}

// Up to 64 rows by B neighbouring blocks: a piece of their codes becomes pairs in L1 once for all rows, which do with
// it what float8_tile() does with codes.
template <int B>
struct Float8Piece {
  static constexpr int64_t kInputs = 128;
  static constexpr int64_t kRowWords = kCodeBlocks * kBlockN;
  const Quantized& q;
  const StagedX& staged;
  int64_t m;
  const uint8_t* w;
  float* sums;     // [rows][kRowWords]
  float* words;    // the same, of a group whose end is in another piece
  uint8_t* lines;  // [kInputs / 2][B] of pairs

  void widen(int64_t k0, int64_t size) const {
    for (int64_t k = k0; k < k0 + size; k += 2) {
      const int64_t at = k * kBlockN, ahead = q.ahead(at, B);
      for (int b = 0; b < B; b++) {
        const uint8_t* codes = w + b * q.block + at;
        __builtin_prefetch(codes + ahead, 0, 3);
        _mm512_store_si512(lines + ((k - k0) / 2 * B + b) * kLine, float8_pairs(codes));
      }
    }
  }

  // Rows r .. r + R - 1; the piece is inputs k0 .. k0 + size - 1 of group g.
  template <int R>
  void multiply(int64_t r, int64_t g, int64_t k0, int64_t size) const {
    const bool first = k0 == g * q.group, last = k0 + size == (g + 1) * q.group;
    Lanes16 acc[R][B];
    clear(acc);
    for (int i = 0; i < R && !first; i++)
      for (int b = 0; b < B; b++) acc[i][b].load_line(words + (r + i) * kRowWords + b * kBlockN);
    const bf16* x[R];
    for (int i = 0; i < R; i++) x[i] = reinterpret_cast<const bf16*>(staged.at(m + r + i, 0)) + k0;
    for (int64_t k = 0; k < size; k += 2) {
      __m512bh line[B];
      for (int b = 0; b < B; b++)
        line[b] = reinterpret_cast<__m512bh>(_mm512_load_si512(lines + (k / 2 * B + b) * kLine));
      add_pairs_of<R, B>(line, x, k, acc);
    }
    if (r == 0) fetch_numbers<B>(q, w, g);
    for (int b = 0; b < B; b++) {
      const Lanes16 scale = load_scales(w + b * q.block + q.scales, g * kBlockN, q.scale_type);
      for (int i = 0; i < R; i++) {
        const int64_t at = (r + i) * kRowWords + b * kBlockN;
        if (last) {
          restore_float8(acc[i][b]);
          add_scaled(sums + at, acc[i][b], scale, g == 0);
        } else {
          acc[i][b].store_line(words + at);
        }
      }
    }
  }

  void multiply_rows(int rows, int64_t g, int64_t k0, int64_t size) const {
    int r = 0;
    for (; r + 4 <= rows; r += 4) multiply<4>(r, g, k0, size);
    for (; r < rows; r++) multiply<1>(r, g, k0, size);
  }

  void run(int rows) const {
    for (int64_t g = 0; g < q.groups; g++)
      for (int64_t k = g * q.group; k < (g + 1) * q.group; k += kInputs) {
        const int64_t size = lesser(kInputs, (g + 1) * q.group - k);
        widen(k, size);
        multiply_rows(rows, g, k, size);
      }
  }
};

struct Float8Dots : VectorProduct {
  static constexpr int kBlocks = kCodeBlocks, kRows = 64;
  static constexpr int kFewRows = 4;  // that meet codes in registers
  static constexpr bool kTakesBf16 = true;
  const Quantized& q;
  const StagedX& x;
  Float8Dots(const Quantized& layout, const StagedX& staged) : q(layout), x(staged) {}

  template <int R>
  void blocks(int64_t m, const uint8_t* w, int count, float* sums) const {
    if (count == kBlocks) return float8_tile<R, kBlocks>(q, x, m, w, sums);
    for (int b = 0; b < count; b++) float8_tile<R, 1>(q, x, m, w + b * q.block, sums + b * kBlockN);
  }
  void pieces(int64_t m, int rows, const uint8_t* w, int count, float* sums) const {
    alignas(64) float words[kRows * kBlocks * kBlockN];
    alignas(64) uint8_t lines[Float8Piece<kBlocks>::kInputs / 2 * kBlocks * kLine];
    if (count == kBlocks) return Float8Piece<kBlocks>{q, x, m, w, sums, words, lines}.run(rows);
    for (int b = 0; b < count; b++)
      Float8Piece<1>{q, x, m, w + b * q.block, sums + b * kBlockN, words, lines}.run(rows);
  }
  void tile(int64_t m, int rows, const uint8_t* w, int count, float* sums) const {
    if (rows > kFewRows) return pieces(m, rows, w, count, sums);
    switch (rows) {
      case 4: return blocks<4>(m, w, count, sums);
      case 3: return blocks<3>(m, w, count, sums);
      case 2: return blocks<2>(m, w, count, sums);
      default: return blocks<1>(m, w, count, sums);
    }
  }
};

}  // namespace radix::cpu::RK_ISA

#endif
