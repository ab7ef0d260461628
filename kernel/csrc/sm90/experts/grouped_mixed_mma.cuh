// Launches of grouped_mixed_mma.
#pragma once

#include <algorithm>

#include "sm90/experts/grouped_mixed_mma_kernel.cuh"
#include "sm90/experts/order.cuh"

namespace radix::experts {

inline GroupedMixedMmaParams params_of(const Problem& q, const linear::MixedWeights& w, int n, bool gated) {
  GroupedMixedMmaParams p = {};
  p.codes = w.codes;
  p.scales = w.scales;
  p.zeros = w.zeros;
  p.k_tiles = w.k_tiles;
  p.numbers = w.numbers;
  p.scale_type = w.scale_type;
  p.scale_bytes = w.scale_bytes;
  p.by_rows = w.numbers == 1;
  p.routing = q.routing;
  p.expert_step = static_cast<uint32_t>(w.step);
  p.rows = gated ? 2 * n : n;
  p.columns = n;
  p.units = (n + linear::kStripRows - 1) / linear::kStripRows;
  p.up_strips = gated ? p.units : 0;
  return p;
}

template <class T, class Tile>
void launch_mixed_mma_product(const Problem& q, GroupedMixedMmaParams p) {
  static_assert(Tile::kShareRegisters, "the kernel moves registers");
  p.most_units = p.up_strips ? Tile::kStrips / 2 : Tile::kStrips;
  static_assert(Tile::kStrips <= 32, "a lane weighs each size of tiles");
  sm90::LaunchShape shape;
  shape.grid = dim3(multiprocessors(q.device));
  shape.threads = Tile::kThreads;
  shape.shared_bytes = std::max(Tile::kSharedBytes, Tile::Plan::scratch_bytes(q.routing) + 1024);
  const auto kernel = grouped_mixed_mma_kernel<T, Tile>;
  // launch_dependent() asks for what exceeds 48 KiB of dynamic memory; the kernel has some of its own beside it.
  const gpu::DeviceScope scope(q.device);
  gpu::raise_kernel_attribute(q.op, q.device, kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
  sm90::launch_dependent(q.op, q.device, q.stream, kernel, shape, p);
}

// k is shared by two warps where a multiprocessor has up to 8 strips, whichever experts the pairs name.
template <class T, linear::Code kCode, int kGroup, int kTokens>
void mixed_mma_product(const Problem& q, const GroupedMixedMmaParams& p) {
  const int64_t strips = int64_t{std::min(q.pairs(), q.experts)} * p.units * (p.up_strips ? 2 : 1);
  if (strips <= 8 * multiprocessors(q.device))
    return launch_mixed_mma_product<T, GroupedMixedMmaTile<kCode, kGroup, kTokens, 8, 2>>(q, p);
  launch_mixed_mma_product<T, GroupedMixedMmaTile<kCode, kGroup, kTokens, 16, 1>>(q, p);
}

template <class T, linear::Code kCode, int kGroup, int kTokens>
void launch_grouped_mixed_mma(const MixedProblem& m, const Scratch& s) {
  const Problem& q = m.q;
  GroupedMixedMmaParams p = params_of(q, m.w1, q.inter, true);
  p.x = q.x;
  p.x_step = q.x_step;
  p.x_bytes = q.hidden * 2;
  p.x_pairs = q.routing.topk;
  p.first = true;
  p.bias = m.bias1;
  p.activation = m.activation;
  p.out = s.act;
  mixed_mma_product<T, kCode, kGroup, kTokens>(q, p);

  p = params_of(q, m.w2, q.hidden, false);
  p.x = s.act;
  p.x_step = int64_t{q.inter} * 2;
  p.x_bytes = q.inter * 2;
  p.x_pairs = 1;
  p.bias = m.bias2;
  p.out = s.rows;
  mixed_mma_product<T, kCode, kGroup, kTokens>(q, p);
  combine(q, s.rows);
}

// Tiles of 8 pairs, or of 16 where experts have more than 4 in the mean; the bits of both are the same. With groups of
// 32 whose scales do not go into the operand, the sums of 16 pairs do not fit into the registers.
template <class T, linear::Code kCode, int kGroup>
void grouped_mixed_mma(const MixedProblem& m, const Scratch& s) {
  if constexpr (kGroup > 32 || linear::kFoldsScales<T, kCode>) {
    const bool few = m.q.routing.tokens <= 8 || m.q.pairs() <= 4 * m.q.routing.named;
    if (!few) return launch_grouped_mixed_mma<T, kCode, kGroup, 16>(m, s);
  }
  launch_grouped_mixed_mma<T, kCode, kGroup, 8>(m, s);
}

}  // namespace radix::experts
