// 16-bit products of more than kSwapAbTokens tokens on the swap-AB kernel: a tile has all tokens, of which wgmma takes
// any multiple of 8 as its columns, so that nothing is read or multiplied for those that a tile of 128 rows would lack.
#pragma once

#include "sm90/gemm/wgmma_swap_ab.cuh"

namespace radix::gemm {

template <sm90::Operand kType, class Out, int kTokens>
void swap_ab_many(const Problem& q, int share) {
  const SwapAbShape shape = swap_ab_tiles(q, multiprocessors(q.device), share, kSwapAbManyRows);
  shape.rows <= sm90::kWgmmaRows ? launch_swap_ab<kType, Out, SwapAbTile<1, 1, kTokens, false, false>>(q, shape)
                                 : launch_swap_ab<kType, Out, SwapAbTile<1, 2, kTokens, false, false>>(q, shape);
}

// share: swap_ab_many_share()'s.
template <class T>
void wgmma_swap_ab_many(const Problem& q, int share) {
  constexpr auto kType = sm90::kOperand<T>;
  if (q.m <= 96) return swap_ab_many<kType, T, 96>(q, share);
  if (q.m <= 128) return swap_ab_many<kType, T, 128>(q, share);
  if (q.m <= 144) return swap_ab_many<kType, T, 144>(q, share);
  if (q.m <= 160) return swap_ab_many<kType, T, 160>(q, share);
  swap_ab_many<kType, T, kSwapAbManyTokens>(q, share);
}

}  // namespace radix::gemm
