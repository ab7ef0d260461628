// Grouped products: rows of x by the weight of their group. The kernel for sorted pairs without what stands around it.
#pragma once

#include "sm90/experts/grouped_swap_ab.cuh"

namespace radix::experts {

template <class T, Format kFormat, int kMaxColumns>
void launch_grouped(const Grouped& g) {
  using Tile = GroupedSwapAbTile<kFormat, false, kMaxColumns>;
  constexpr int kItem = kFormat == Format::fp8 ? 1 : 2;
  const int blocks = (g.k + 127) / 128, each = Tile::kFeatures * Tile::kCluster;
  GroupedSwapAbParams p = {};
  p.begins = g.begins;
  p.ends = g.ends;
  p.room = g.room;
  p.named = g.groups;
  p.n = p.expert_rows = g.n;
  p.row_tiles = (g.n + each - 1) / each;
  p.chunks = (g.k + Tile::kChunk - 1) / Tile::kChunk;
  p.scales = {g.w_scale, int64_t{(g.n + 127) / 128} * blocks, blocks, 1, blocks - 1};
  p.out = g.out;
  p.out_step = g.out_step;
  sm90::TensorMap scales = {};
  if (kFormat == Format::fp8) scales = scales_map(g.x_scale, blocks, g.scale_step, Tile::kScaleBox);
  launch_product<T, Tile>(g.q, p,
                          rows_map(g.q, g.weight, g.k, int64_t{g.k} * kItem, int64_t{g.groups} * g.n, kTileRows, kItem),
                          rows_map(g.q, g.x, g.k, g.x_step, g.rows, Tile::kBox, kItem), scales);
}

template <class T, Format kFormat>
void grouped_gemm(const Grouped& g) {
  g.expected <= 32 ? launch_grouped<T, kFormat, 64>(g) : launch_grouped<T, kFormat, kMostColumns<kFormat>>(g);
}

}  // namespace radix::experts
