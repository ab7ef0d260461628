// The same product with AVX-512-BF16's dot product of pairs: bfloat16 operands, two multiply-adds a lane and
// instruction.
//
// For machines that have it but no AMX, at every M, so that a row's bits do not depend on the batch: each accumulator
// takes the pairs in ascending k. The instruction treats subnormal operands and sums as zero.
#pragma once

#if defined(__AVX512BF16__)

#include <immintrin.h>

#include <cstring>

#include "common/dtype.h"
#include "cpu/linear/layout.h"

namespace radix::cpu::RK_ISA {

// x: Rows pointers to bf16 [kp], zero from k on. w: first of Blocks consecutive packed blocks.
// out: float [Rows][Blocks][16].
template <int Rows, int Blocks>
inline void dot_tile(const bf16* const* x, const bf16* w, int64_t kp, float* out) {
  constexpr int kPrefetch = 2048;  // bytes ahead
  static_assert(Rows >= 1 && Blocks >= 1 && Rows * Blocks + Blocks + 1 <= 32, "sums and operands in registers");
  const int64_t block = linear_layout::kBlockN * kp;
  __m512 acc[Rows][Blocks];
  for (auto& row : acc)
    for (__m512& a : row) a = _mm512_setzero_ps();
  for (int64_t k = 0; k < kp; k += 2) {
    const int64_t at = k * linear_layout::kBlockN;
    const int64_t ahead = linear_layout::fetch_ahead(at * 2, block * 2, Blocks, kPrefetch);
    __m512bh line[Blocks];
    for (int b = 0; b < Blocks; b++) {
      const bf16* p = w + b * block + at;
      __builtin_prefetch(reinterpret_cast<const char*>(p) + ahead, 0, 3);
      line[b] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(p));
    }
    for (int r = 0; r < Rows; r++) {
      int32_t pair;
      std::memcpy(&pair, x[r] + k, sizeof pair);
      const __m512bh value = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      for (int b = 0; b < Blocks; b++) acc[r][b] = _mm512_dpbf16_ps(acc[r][b], line[b], value);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int b = 0; b < Blocks; b++) _mm512_storeu_ps(out + (r * Blocks + b) * 16, acc[r][b]);
}

}  // namespace radix::cpu::RK_ISA

#endif
