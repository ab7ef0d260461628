// Choice of the mixed_mma kernel's shape.
#pragma once

#include <algorithm>

#include "sm90/linear/mixed_mma_kernel.cuh"
#include "sm90/linear/problem.cuh"
#include "sm90/linear/x_map.cuh"

namespace radix::linear {

template <class T, class Tile>
void launch_mixed_mma(const Problem& q) {
  const gemm::Problem& g = q.gemm;
  const Layout& l = q.layout;
  const bool halves = g.epilogue.gate == Gate::halves;
  MixedParams p = {};
  p.codes = q.packed;
  p.scales = q.packed + l.scales;
  p.zeros = l.zeros ? q.packed + l.zeros : nullptr;
  p.k_tiles = static_cast<int>(l.k_tiles);
  p.numbers = static_cast<int>(l.numbers);
  p.scale_type = q.scale_type;
  p.scale_bytes = l.scale_bytes;
  p.by_rows = l.groups == 1;
  p.x_by_tiles = g.k % kTileK == 0;
  p.m = g.m;
  p.columns = g.gated() ? g.n / 2 : g.n;
  const int strips = (g.n + kStripRows - 1) / kStripRows;
  p.units = halves ? strips / 2 : strips;
  p.up_strips = halves ? strips / 2 : 0;
  p.static_weight = g.static_weight;
  p.epilogue = g.epilogue;
  // Tiles alike, in the fewest rounds of a block a multiprocessor.
  const int sms = gpu::multiprocessors(g.device), most = halves ? Tile::kStrips / 2 : Tile::kStrips;
  const int rounds = (p.units + most * sms - 1) / (most * sms);
  p.tile_units = (p.units + sms * rounds - 1) / (sms * rounds);
  p.tiles = (p.units + p.tile_units - 1) / p.tile_units;
  sm90::LaunchShape shape;
  shape.grid = dim3(std::min(p.tiles, sms));
  shape.threads = Tile::kThreads;
  shape.shared_bytes = Tile::kSharedBytes;
  sm90::launch_dependent(g.op, g.device, g.stream, mixed_mma_kernel<T, Tile>, shape,
                         p.x_by_tiles ? x_map_by_tiles(g, Tile::kTokens, Tile::kStageTiles) : x_map(g, Tile::kTokens),
                         p);
}

// By the strips of a multiprocessor, so that most warps have rows where those are few.
template <class T, Code kCode, int kGroup, int kTokens>
void mixed_mma_of(const Problem& q) {
  constexpr int kRound = round_tiles<kCode, kGroup, kTokens, kFoldsScales<T, kCode>>();
  constexpr bool kFew = kTokens <= 16;
  const int sms = gpu::multiprocessors(q.gemm.device), strips = (q.gemm.n + kStripRows - 1) / kStripRows;
  const int unit = q.gemm.epilogue.gate == Gate::halves ? 2 : 1;
  const int of_block = (strips / unit + sms - 1) / sms * unit;
  if (of_block <= 4) return launch_mixed_mma<T, MixedTile<kCode, kGroup, kTokens, 4, kFew ? 4 : 2, 1, kRound>>(q);
  if (of_block <= 8) return launch_mixed_mma<T, MixedTile<kCode, kGroup, kTokens, 8, kFew ? 2 : 1, 1, kRound>>(q);
  if constexpr (kFew) {
    launch_mixed_mma<T, MixedTile<kCode, kGroup, kTokens, 16, 1, 1, kRound>>(q);
  } else {
    // x from shared memory serves two strips.
    launch_mixed_mma<T, MixedTile<kCode, kGroup, kTokens, 7, 1, 2, kRound>>(q);
  }
}

template <class T, Code kCode, int kGroup>
void mixed_mma(const Problem& q) {
  if (q.gemm.m <= 8) return mixed_mma_of<T, kCode, kGroup, 8>(q);
  if (q.gemm.m <= 16) return mixed_mma_of<T, kCode, kGroup, 16>(q);
  mixed_mma_of<T, kCode, kGroup, 32>(q);
}

}  // namespace radix::linear
