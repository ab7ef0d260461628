// Launches of grouped_mixed.
#pragma once

#include "sm90/experts/grouped_mixed_kernel.cuh"
#include "sm90/experts/grouped_swap_ab.cuh"
#include "sm90/experts/order.cuh"

namespace radix::experts {

template <class Tile>
void launch_mixed_product(const Problem& q, const GroupedMixedParams& p, const sm90::TensorMap& x) {
  sm90::LaunchShape shape;
  shape.grid = dim3(multiprocessors(q.device));
  shape.threads = Tile::kThreads;
  shape.shared_bytes = Tile::kSharedBytes;
  sm90::launch_dependent(q.op, q.device, q.stream, grouped_mixed_kernel<Tile>, shape, x, p);
}

template <class T, linear::Code kCode, int kGroup, int kMaxColumns>
void launch_grouped_mixed(const MixedProblem& m, const Scratch& s) {
  using Up = GroupedMixedTile<T, kCode, kGroup, true, kMaxColumns>;
  using Down = GroupedMixedTile<T, kCode, kGroup, false, kMaxColumns>;
  const Problem& q = m.q;
  const auto tiles = [](int n, int each) { return (n + each - 1) / each; };
  GroupedMixedParams p = {};
  p.placed = gather_rows(q, s);
  p.begins = s.offsets;
  p.ends = s.offsets + 1;
  p.map = q.routing.map;
  p.named = q.routing.named;
  p.weights = m.w1;
  p.rows = 2 * q.inter;
  p.row_tiles = tiles(q.inter, Up::kFeatures);
  p.weights.second_row = q.inter;
  p.bias = m.bias1;
  p.activation = m.activation;
  p.out = s.act;
  p.n = q.inter;
  launch_mixed_product<Up>(q, p, rows_map(q, s.rows, q.hidden, int64_t{q.hidden} * 2, q.pairs(), Up::kBox, 2));

  p.placed = true;
  p.weights = m.w2;
  p.rows = q.hidden;
  p.row_tiles = tiles(p.rows, Down::kFeatures);
  p.bias = m.bias2;
  p.out = s.rows;
  p.sorted = s.sorted;
  p.n = q.hidden;
  launch_mixed_product<Down>(q, p, rows_map(q, s.act, q.inter, int64_t{q.inter} * 2, q.pairs(), Down::kBox, 2));
  combine(q, s.rows);
}

// Up to 32 pairs an expert in the mean the weights' bytes bound the product: small tiles, a deep ring.
template <class T, linear::Code kCode, int kGroup>
void grouped_mixed(const MixedProblem& m, const Scratch& s) {
  if (m.q.pairs() <= 32 * m.q.routing.named) return launch_grouped_mixed<T, kCode, kGroup, 64>(m, s);
  launch_grouped_mixed<T, kCode, kGroup, 128>(m, s);
}

}  // namespace radix::experts
