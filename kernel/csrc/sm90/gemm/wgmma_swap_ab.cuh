// Choice of the swap-AB kernel's instantiation, up to kSwapAbTokens tokens, and its launch.
#pragma once

#include "sm90/gemm/tensor_maps.cuh"
#include "sm90/gemm/wgmma_swap_ab_kernel.cuh"
#include "sm90/gemm/wgmma_swap_ab_tiles.cuh"

namespace radix::gemm {

// Blocks that share k, for a weight too small to give every multiprocessor 64 rows of its own. From n, k and the
// tokens' range (1 .. 16, 17 .. 64) alone: a token's bits depend on it.
inline int swap_ab_splits(const Problem& q, int multiprocessors) {
  const int chunks = (q.k * q.element_size() + 127) / 128;
  if (q.n >= 64 * multiprocessors || chunks < 8) return 1;
  if (q.n >= 16 * multiprocessors || chunks < 32) return 2;
  return q.m <= kMmaM16Tokens ? 8 : 4;
}

template <sm90::Operand kType, class Out, class Tile>
void launch_swap_ab(const Problem& q, const SwapAbShape& s) {
  auto p = params_of<ParamsOf<kType, SwapAbParams>>(q);
  if (p.gated) p.n = q.n / 2;
  p.rows = s.rows;
  p.tiles = (q.n + s.rows - 1) / s.rows;
  sm90::LaunchShape shape;
  shape.grid = dim3(s.share, s.share > 1 ? p.tiles : std::min(s.clusters, p.tiles), q.batch);
  shape.threads = Tile::kThreads;
  shape.shared_bytes = Tile::kSharedBytes;
  shape.cluster = s.share;
  sm90::launch_dependent(q.op, q.device, q.stream, wgmma_swap_ab_kernel<kType, Out, Tile>, shape, weight_map(q, s.rows),
                         token_map(q, q.m), p);
}

// From so many bytes on a weight is read by blocks that take a whole multiprocessor, with twice the bytes on their way:
// what the next kernel could fetch beside them is little against that.
constexpr int64_t kSwapAbLargeBytes = 96 << 20;

// Weights whose k is shared: blocks with up to 64 rows, of half a multiprocessor, two beside each other where a round
// is not enough. Larger ones: persistent blocks with up to 128 rows; above 32 tokens with 256 and the whole
// multiprocessor, so that x is read seldom.
template <sm90::Operand kType, class Out, int kTokens, bool kBlockScaled>
void swap_ab(const Problem& q) {
  const int sms = multiprocessors(q.device), share = swap_ab_splits(q, sms);
  const bool large = int64_t{q.n} * q.k * q.element_size() >= kSwapAbLargeBytes;
  const SwapAbShape small = swap_ab_tiles(q, sms, share, 64);
  if (share > 1 || q.n <= 64 * sms) {
    large ? launch_swap_ab<kType, Out, SwapAbTile<1, 1, kTokens, kBlockScaled, false>>(q, small)
          : launch_swap_ab<kType, Out, SwapAbTile<1, 1, kTokens, kBlockScaled, true>>(q, small);
  } else if constexpr (kTokens <= 32) {
    const SwapAbShape shape = swap_ab_tiles(q, sms, 1, 128);
    large ? launch_swap_ab<kType, Out, SwapAbTile<2, 1, kTokens, kBlockScaled, false>>(q, shape)
          : launch_swap_ab<kType, Out, SwapAbTile<2, 1, kTokens, kBlockScaled, true>>(q, shape);
  } else {
    launch_swap_ab<kType, Out, SwapAbTile<2, 2, kTokens, kBlockScaled, false>>(q, swap_ab_tiles(q, sms, 1, 256));
  }
}

template <class Out, bool kBlockScaled>
void swap_ab_fp8(const Problem& q) {
  q.m <= 32 ? swap_ab<sm90::Operand::e4m3, Out, 32, kBlockScaled>(q)
            : swap_ab<sm90::Operand::e4m3, Out, 64, kBlockScaled>(q);
}

template <class Out>
void swap_ab_int8(const Problem& q) {
  q.m <= 32 ? swap_ab<sm90::Operand::s8, Out, 32, false>(q) : swap_ab<sm90::Operand::s8, Out, 64, false>(q);
}

// By the type of the operands.
template <class T>
void wgmma_swap_ab(const Problem& q) {
  if constexpr (__is_same(T, e4m3)) {
    if (q.out_type == DType::bf16) {
      q.block_w ? swap_ab_fp8<bf16, true>(q) : swap_ab_fp8<bf16, false>(q);
    } else {
      q.block_w ? swap_ab_fp8<f16, true>(q) : swap_ab_fp8<f16, false>(q);
    }
  } else if constexpr (__is_same(T, int8_t)) {
    q.out_type == DType::bf16 ? swap_ab_int8<bf16>(q) : swap_ab_int8<f16>(q);
  } else {
    constexpr auto kType = sm90::kOperand<T>;
    if (q.m <= 16) return swap_ab<kType, T, 16, false>(q);
    if (q.m <= 32) return swap_ab<kType, T, 32, false>(q);
    swap_ab<kType, T, 64, false>(q);
  }
}

}  // namespace radix::gemm
