// Choice of the mma_m16 kernel's shape: teams, groups and blocks.
#pragma once

#include <algorithm>

#include "sm90/gemm/mma_m16_kernel.cuh"
#include "sm90/gemm/problem.cuh"

namespace radix::gemm {

// A kernel's shape: row groups a pass, units of k in flight ahead, blocks of a multiprocessor.
template <int kGroups_, int kDepth_, int kBlocks_>
struct MmaM16Tile {
  static constexpr int kGroups = kGroups_, kDepth = kDepth_, kBlocks = kBlocks_;
};

template <class Mma, class Tile, int kHalves>
void launch_mma_m16(const Problem& q) {
  MmaM16Params p = {};
  p.x = q.x;
  p.weight = q.weight;
  p.x_step = q.x_step;
  p.weight_step = q.weight_step;
  p.x_batch = q.x_batch;
  p.weight_batch = q.weight_batch;
  p.m = q.m;
  p.n = q.epilogue.gate == Gate::halves ? q.n / 2 : q.n;
  p.up_rows = q.epilogue.gate == Gate::halves ? q.n / 2 : 0;
  p.k_bytes = q.k * q.element_size();
  p.team = kMmaM16Warps;
  p.static_weight = q.static_weight;
  p.epilogue = q.epilogue;
  const int groups = (p.n + 7) / 8;
  sm90::LaunchShape shape;
  shape.grid = dim3(std::min(multiprocessors(q.device) * Tile::kBlocks, groups), 1, q.batch);
  shape.threads = kMmaM16Threads;
  sm90::launch_dependent(q.op, q.device, q.stream,
                         mma_m16_kernel<Mma, Tile::kGroups, kHalves, Tile::kDepth, Tile::kBlocks>, shape, p);
}

template <class T>
void mma_m16(const Problem& q) {
  using Tile = MmaM16Tile<2, 1, 3>;
  q.m <= 8 ? launch_mma_m16<HalfMma<T>, Tile, 1>(q) : launch_mma_m16<HalfMma<T>, Tile, 2>(q);
}

}  // namespace radix::gemm
