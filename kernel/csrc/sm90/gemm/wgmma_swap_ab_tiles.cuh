// Tiles of the swap-AB kernel: blocks that share one and its rows; and what many tokens of 16-bit operands take in
// them.
#pragma once

#include <algorithm>

#include "sm90/common/limits.cuh"
#include "sm90/gemm/problem.cuh"

namespace radix::gemm {

struct SwapAbShape {
  int share;     // blocks of a cluster, over k
  int clusters;  // of the first round: one block a multiprocessor
  int rows;      // of the weight in a tile
};

// Tiles alike, of at most `most` rows, in the fewest rounds of one block a multiprocessor.
inline SwapAbShape swap_ab_tiles(const Problem& q, int multiprocessors, int share, int most) {
  // Clusters of more than 2 leave some multiprocessors of a GPC alone.
  const int clusters = share <= 2 ? multiprocessors / share : multiprocessors / 16 * 16 / share;
  const int unit = q.gated() ? 16 : 8;
  const int rounds = (q.n + most * clusters - 1) / (most * clusters);
  const int rows = (q.n + clusters * rounds - 1) / (clusters * rounds);
  return {share, clusters, std::max((rows + unit - 1) / unit * unit, 16)};
}

// Many tokens, kSwapAbTokens + 1 .. kSwapAbManyTokens: two ranges of m within each of which bits are alike, by the
// number of tokens that each is judged by; 0: m is in neither.
inline int swap_ab_many_range(int m) {
  if (m <= kSwapAbTokens || m > kSwapAbManyTokens) return 0;
  return m <= 128 ? 112 : 160;
}

// Rows of their tiles at most: two warpgroups'.
constexpr int kSwapAbManyRows = 2 * sm90::kWgmmaRows;

// Cycles for so many tokens, in the measure of persistent_cycles(), not fitted to timings so far: 128 bytes of k take 5
// for two rows of either operand, and no less than the tensor cores need, 2 a token and warpgroup; beginning and end of
// a tile 3,000 and 20 a token, an exchange of sums 1,000; and all of it no less than reading the weight, 2,550 bytes a
// cycle.
inline int64_t swap_ab_many_cycles(const Problem& q, int tokens, int share) {
  const SwapAbShape s = swap_ab_tiles(q, multiprocessors(q.device), share, kSwapAbManyRows);
  const int tiles = (q.n + s.rows - 1) / s.rows, rounds = (tiles + s.clusters - 1) / s.clusters;
  const int chunks = ((q.k * q.element_size() + 127) / 128 + share - 1) / share;
  const int groups = s.rows > sm90::kWgmmaRows ? 2 : 1;
  const int64_t each = std::max((s.rows + tokens) * 5 / 2, groups * 2 * tokens);
  const int64_t ends = rounds * (3000 + 20 * tokens + (share - 1) * 1000);
  return ends + std::max(rounds * chunks * each, int64_t{q.n} * q.k * q.element_size() / 2550);
}

// Blocks that share k where many tokens are expected to take this kernel a twentieth less than another's `cycles`; 0
// where not. From n, k and the range of m alone, for bits depend on it.
inline int swap_ab_many_share(const Problem& q, int64_t cycles) {
  const int tokens = swap_ab_many_range(q.m);
  if (tokens == 0) return 0;
  const int64_t whole = swap_ab_many_cycles(q, tokens, 1), halves = swap_ab_many_cycles(q, tokens, 2);
  const int share = q.k >= 1024 && halves < whole ? 2 : 1;
  return 20 * (share == 2 ? halves : whole) < 19 * cycles ? share : 0;
}

}  // namespace radix::gemm
