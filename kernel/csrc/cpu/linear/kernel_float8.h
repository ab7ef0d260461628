// The product of bfloat16 x with FP8 weights by AVX-512-BF16's dot product of pairs, for machines that have it but no
// AMX, at every M: codes become bfloat16 pairs in registers. Within a group an accumulator takes the pairs in ascending
// k; then sum += accumulator * scale, groups ascending. The instruction treats subnormal operands and sums as zero.
#pragma once

#if defined(__AVX512BF16__)

#include "cpu/linear/kernel_codes.h"

namespace radix::cpu::RK_ISA {

// Inputs k .. k + 1, whose codes are at `codes` of each block: acc += codes * x.
template <int R, int B>
inline void float8_dots(const uint8_t* const (&codes)[B], const bf16* const (&x)[R], int64_t k, Lanes16 (&acc)[R][B]) {
  __m512bh line[B];
  for (int b = 0; b < B; b++) line[b] = reinterpret_cast<__m512bh>(float8_pairs(codes[b]));
  for (int r = 0; r < R; r++) {
    int32_t pair;
    std::memcpy(&pair, x[r] + k, sizeof pair);
    const __m512bh value = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
    for (int b = 0; b < B; b++) acc[r][b].part[0].v = _mm512_dpbf16_ps(acc[r][b].part[0].v, line[b], value);
  }
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
      const int64_t at = k * kBlockN, ahead = linear_layout::fetch_ahead(at, q.block, B, kFetchDistance);
      const uint8_t *first[B], *second[B];
      for (int b = 0; b < B; b++) {
        first[b] = w + b * q.block + at;
        second[b] = first[b] + kLine / 2;
        __builtin_prefetch(first[b] + ahead, 0, 3);
      }
      float8_dots(first, x, k, acc);
      float8_dots(second, x, k + 2, acc);
    }
    for (int b = 0; b < B; b++) {
      const Lanes16 scale = load_scales(w + b * q.block + q.scales, g * kBlockN, q.scale_type);
      for (int r = 0; r < R; r++) {
        restore_float8(acc[r][b]);
        add_scaled(sums + (r * kCodeBlocks + b) * kBlockN, acc[r][b], scale, g == 0);
      }
    }
  }
}

struct Float8Dots : VectorProduct {
  static constexpr int kBlocks = kCodeBlocks;
  static constexpr bool kTakesBf16 = true;
  const Quantized& q;
  const StagedX& x;
  Float8Dots(const Quantized& layout, const StagedX& staged) : q(layout), x(staged) {}

  template <int R>
  void blocks(int64_t m, const uint8_t* w, int count, float* sums) const {
    if (count == kBlocks) return float8_tile<R, kBlocks>(q, x, m, w, sums);
    for (int b = 0; b < count; b++) float8_tile<R, 1>(q, x, m, w + b * q.block, sums + b * kBlockN);
  }
  void tile(int64_t m, int rows, const uint8_t* w, int count, float* sums) const {
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
