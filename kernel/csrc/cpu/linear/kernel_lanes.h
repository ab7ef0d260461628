// y[m][n] = sum_k x[m][k] * w[n][k] for a tile of rows and packed 16-output blocks, any ISA level.
//
// Small M is bound by reading the weights once: each thread streams Blocks lines side by side with a
// prefetch ahead. Large M is bound by FMA: Rows x Blocks accumulators stay in registers while the
// tile's weights (a few hundred KiB) stay in L2 from one group of rows to the next.
// Each accumulator sums over k in ascending order with nothing in between, so a row's bits depend on
// neither the other rows nor the tile it landed in.
#pragma once

#include "cpu/linear/lanes16.h"
#include "cpu/linear/layout.h"

namespace radix::cpu::RK_ISA {

constexpr int64_t kPrefetchBytes = 2048;

// The lines of one step of k: one line for lanes16, an even and an odd one for pairs16.
template <class W>
constexpr int kLinesPerStep = 1;
template <>
constexpr int kLinesPerStep<bf16> = 2;

template <class W>
inline void load_step(const W* p, Lanes16 (&lines)[kLinesPerStep<W>]) {
  if constexpr (kLinesPerStep<W> == 2) {
    load_pairs(p, lines[0], lines[1]);
  } else {
    lines[0].load_line(p);
  }
}

// x: Rows pointers to float [kp], zero from k on. w: first of Blocks consecutive packed blocks.
// out: float [Rows][Blocks][16].
template <int Rows, int Blocks, class W>
inline void lanes_tile(const float* const* x, const W* w, int64_t kp, float* out) {
  constexpr int kStep = kLinesPerStep<W>;
  static_assert(Rows >= 1 && Blocks >= 1);
  static_assert(linear_layout::kPadK % kStep == 0);
  const int64_t block = linear_layout::kBlockN * kp;
  Lanes16 acc[Rows][Blocks];
  for (auto& row : acc)
    for (auto& a : row) a.clear();
  for (int64_t k = 0; k < kp; k += kStep) {
    const int64_t at = k * linear_layout::kBlockN, size = sizeof(W);
    const int64_t ahead = linear_layout::fetch_ahead(at * size, block * size, Blocks, kPrefetchBytes);
    Lanes16 lines[Blocks][kStep];
    for (int b = 0; b < Blocks; ++b) {
      const W* p = w + b * block + at;
      __builtin_prefetch(reinterpret_cast<const char*>(p) + ahead, 0, 3);
      load_step(p, lines[b]);
    }
    for (int r = 0; r < Rows; ++r)
      for (int b = 0; b < Blocks; ++b)
        for (int s = 0; s < kStep; ++s) acc[r][b].accumulate(x[r][k + s], lines[b][s]);
  }
  for (int r = 0; r < Rows; ++r)
    for (int b = 0; b < Blocks; ++b) acc[r][b].store_line(out + (r * Blocks + b) * 16);
}

}  // namespace radix::cpu::RK_ISA
