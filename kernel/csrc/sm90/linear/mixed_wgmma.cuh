// Launches the mixed_wgmma kernel as planned.
#pragma once

#include <algorithm>

#include "sm90/linear/mixed_wgmma_kernel.cuh"
#include "sm90/linear/problem.cuh"
#include "sm90/linear/x_map.cuh"

namespace radix::linear {

static_assert(kMostBlocks == sm90::kPortableCluster);

template <class T, Code kCode, int kGroup, const WgmmaForm& kForm>
using WgmmaTileOf = MixedWgmmaTile<T, kCode, kGroup, kForm.tokens, kForm.strips, kForm.k_parts>;

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
  p.tiles = ceil_div(row_tiles_of(planned(q), plan.form), plan.row_blocks) * p.token_tiles;
  p.row_bits = log2_of(plan.row_blocks);
  p.share_bits = log2_of(plan.k_shares);
  const int blocks = p.blocks();
  p.chunks = ceil_div(p.weight.k_tiles, Tile::kChunkTiles);
  sm90::LaunchShape shape;
  shape.grid = dim3(blocks * std::min(p.tiles, clusters_of(gpu::multiprocessors(g.device), blocks)));
  shape.threads = Tile::kThreads;
  shape.shared_bytes = Tile::kSharedBytes;
  shape.cluster = blocks;
  sm90::launch_dependent(g.op, g.device, g.stream, mixed_wgmma_kernel<Tile>, shape,
                         x_map(g, Tile::kMaxColumns / plan.row_blocks), p);
}

template <class T, Code kCode, int kGroup>
void mixed_wgmma(const Problem& q) {
  const MixedPlan plan = mixed_plan(planned(q), q.gemm.m);
  const WgmmaForm& form = plan.form;
  if (form.tokens == kWide.tokens) return launch_mixed_wgmma<WgmmaTileOf<T, kCode, kGroup, kWide>>(q, plan);
  if (form.tokens == kNarrow.tokens) return launch_mixed_wgmma<WgmmaTileOf<T, kCode, kGroup, kNarrow>>(q, plan);
  if (form.strips == kTall.strips) return launch_mixed_wgmma<WgmmaTileOf<T, kCode, kGroup, kTall>>(q, plan);
  launch_mixed_wgmma<WgmmaTileOf<T, kCode, kGroup, kLong>>(q, plan);
}

}  // namespace radix::linear
