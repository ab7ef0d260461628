// Choice of the mixed_wgmma kernel's tiles.
#pragma once

#include <algorithm>

#include "sm90/linear/mixed_wgmma_kernel.cuh"
#include "sm90/linear/problem.cuh"
#include "sm90/linear/x_map.cuh"

namespace radix::linear {

template <class Tile>
void launch_mixed_wgmma(const Problem& q, int token_tiles) {
  const gemm::Problem& g = q.gemm;
  const bool halves = g.epilogue.gate == gemm::Gate::halves;
  const auto tiles = [](int n, int each) { return (n + each - 1) / each; };
  MixedWgmmaParams p = {};
  p.weight = mixed_weights(q.layout, q.packed, 0, q.scale_type);
  if (halves) p.weight.second_row = g.n / 2;
  p.epilogue = g.epilogue;
  p.m = g.m;
  p.columns = g.gated() ? g.n / 2 : g.n;
  p.row_tiles = halves ? tiles(g.n / 2, kTileRows) : tiles(g.n, 2 * kTileRows);
  p.token_tiles = token_tiles;
  p.tokens = (tiles(g.m, token_tiles) + 7) / 8 * 8;  // evenly
  sm90::LaunchShape shape;
  shape.grid = dim3(std::min(p.row_tiles * token_tiles, gpu::multiprocessors(g.device)));
  shape.threads = kMixedThreads;
  shape.shared_bytes = Tile::kSharedBytes;
  sm90::launch_dependent(g.op, g.device, g.stream, mixed_wgmma_kernel<Tile>, shape, x_map(g, Tile::kBox), p);
}

// Tiles of 64 tokens where those of 128 would leave multiprocessors without one.
template <class T, Code kCode, int kGroup>
void mixed_wgmma(const Problem& q) {
  const int rows = (q.gemm.n + 2 * kTileRows - 1) / (2 * kTileRows), wide = (q.gemm.m + 127) / 128;
  if (rows * wide < gpu::multiprocessors(q.gemm.device))
    return launch_mixed_wgmma<MixedWgmmaTile<T, kCode, kGroup, 64>>(q, (q.gemm.m + 63) / 64);
  launch_mixed_wgmma<MixedWgmmaTile<T, kCode, kGroup, 128>>(q, wide);
}

}  // namespace radix::linear
