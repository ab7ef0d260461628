// Choice of the mixed_wgmma kernel's tiles and clusters.
#pragma once

#include <algorithm>

#include "sm90/linear/mixed_wgmma_kernel.cuh"
#include "sm90/linear/problem.cuh"
#include "sm90/linear/x_map.cuh"

namespace radix::linear {

// Blocks of a cluster: neighbours along the weight's rows, times shares of k; and what the product should take.
struct MixedPlan {
  int row_blocks, k_shares;
  int64_t cycles;
};

// What the estimate of a plan counts with, in cycles of a multiprocessor.
constexpr int kReadBytes = 24;                             // from L2 in a cycle, where all multiprocessors read
constexpr int kEpilogueCycles = 800, kShareCycles = 1500;  // of 64 tokens; where blocks share k
constexpr int kFillCycles = 1500;                          // of a launch
constexpr int kMostRowBlocks = 2, kMostShares = 8;
constexpr int kPlannedTokens = 128;  // tokens for which shares of k are chosen, where there are more than 64

inline int ceil_div(int n, int each) {
  return (n + each - 1) / each;
}

inline int log2_of(int power) {
  return power > 1 ? 1 + log2_of(power / 2) : 0;
}

// Row tiles of a product: of gate halves a tile has as many ups as gates.
template <class Tile>
int row_tiles_of(const gemm::Problem& g) {
  const bool halves = g.epilogue.gate == gemm::Gate::halves;
  return halves ? ceil_div(g.n / 2, Tile::Sums::kRows / 2) : ceil_div(g.n, Tile::Sums::kRows);
}
// Clusters that run at once. Larger ones lie within groups of 16 multiprocessors.
inline int clusters_of(rk_device device, int blocks) {
  const int sms = gpu::multiprocessors(device);
  return blocks <= 2 ? sms / blocks : std::max(1, sms / 16 * 16 / blocks);
}

template <class Tile>
int64_t cycles_of(const Problem& q, int tokens, int row_blocks, int k_shares) {
  const int tiles = ceil_div(row_tiles_of<Tile>(q.gemm), row_blocks) * ceil_div(tokens, Tile::kMaxColumns);
  const int rounds = ceil_div(tiles, clusters_of(q.gemm.device, row_blocks * k_shares));
  const int k_tiles = ceil_div(static_cast<int>(q.layout.k_tiles), k_shares);
  const int multiply = Tile::kStrips * 2 * Tile::kMaxColumns;
  const int read = (Tile::kMaxColumns * 128 / row_blocks + Tile::kStrips * tile_bytes(Tile::kCode)) / kReadBytes;
  const int ends = ceil_div(Tile::kMaxColumns, 64) * (kEpilogueCycles + (k_shares > 1 ? kShareCycles : 0));
  return kFillCycles + int64_t{rounds} * (int64_t{k_tiles} * std::max(multiply, read) + ends);
}

// The fastest clusters for `tokens` tokens; shares: of k, or 0 to choose them.
template <class Tile>
MixedPlan plan(const Problem& q, int tokens, int shares = 0) {
  MixedPlan best = {0, 0, INT64_MAX};
  for (int k_shares = 1; k_shares <= kMostShares; k_shares *= 2) {
    if (shares ? k_shares != shares : k_shares > 1 && q.layout.k_tiles < 4 * Tile::kChunkTiles * k_shares) continue;
    for (int row_blocks = 1; row_blocks <= kMostRowBlocks && row_blocks * k_shares <= sm90::kPortableCluster;
         row_blocks *= 2) {
      const int64_t cycles = cycles_of<Tile>(q, tokens, row_blocks, k_shares);
      if (cycles < best.cycles) best = {row_blocks, k_shares, cycles};
    }
  }
  return best;
}

template <class Tile>
void launch_mixed_wgmma(const Problem& q, const MixedPlan& plan) {
  const gemm::Problem& g = q.gemm;
  MixedWgmmaParams p = {};
  p.weight = mixed_weights(q.layout, q.packed, 0, q.scale_type);
  p.weight.second_row = g.epilogue.gate == gemm::Gate::halves ? g.n / 2 : Tile::Sums::kRows / 2;
  p.epilogue = g.epilogue;
  p.m = g.m;
  p.columns = g.gated() ? g.n / 2 : g.n;
  p.token_tiles = ceil_div(g.m, Tile::kMaxColumns);
  p.tokens = ceil_div(ceil_div(g.m, p.token_tiles), 8) * 8;  // evenly
  p.tiles = ceil_div(row_tiles_of<Tile>(g), plan.row_blocks) * p.token_tiles;
  p.row_bits = log2_of(plan.row_blocks);
  p.share_bits = log2_of(plan.k_shares);
  const int blocks = p.blocks();
  p.chunks = ceil_div(p.weight.k_tiles, Tile::kChunkTiles);
  sm90::LaunchShape shape;
  shape.grid = dim3(blocks * std::min(p.tiles, clusters_of(g.device, blocks)));
  shape.threads = Tile::kThreads;
  shape.shared_bytes = Tile::kSharedBytes;
  shape.cluster = blocks;
  sm90::launch_dependent(g.op, g.device, g.stream, mixed_wgmma_kernel<Tile>, shape,
                         x_map(g, Tile::kMaxColumns / plan.row_blocks), p);
}

// How many share k follows from the weight and whether tokens are more than 64, and so do a token's bits.
template <class T, Code kCode, int kGroup>
void mixed_wgmma(const Problem& q) {
  const int m = q.gemm.m;
  if (m <= 64) {
    using Tall = MixedWgmmaTile<T, kCode, kGroup, 64, 4, 1>;
    using Long = MixedWgmmaTile<T, kCode, kGroup, 64, 2, 2>;
    const MixedPlan tall = plan<Tall>(q, 64), shared = plan<Long>(q, 64);
    return tall.cycles <= shared.cycles ? launch_mixed_wgmma<Tall>(q, tall) : launch_mixed_wgmma<Long>(q, shared);
  }
  using Narrow = MixedWgmmaTile<T, kCode, kGroup, 128, 2, 1>;
  using Wide = MixedWgmmaTile<T, kCode, kGroup, 256, 2, 1>;
  const int shares = plan<Narrow>(q, kPlannedTokens).k_shares;
  const MixedPlan narrow = plan<Narrow>(q, m, shares), wide = plan<Wide>(q, m, shares);
  narrow.cycles < wide.cycles ? launch_mixed_wgmma<Narrow>(q, narrow) : launch_mixed_wgmma<Wide>(q, wide);
}

}  // namespace radix::linear
