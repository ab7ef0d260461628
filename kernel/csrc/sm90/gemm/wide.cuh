// Choice of the wide kernel's tile: the one that takes the least time, by a model of it.
#pragma once

#include "sm90/gemm/launch.cuh"
#include "sm90/gemm/maps.cuh"
#include "sm90/gemm/wide_kernel.cuh"

namespace radix::gemm {

inline int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

inline int wide_tiles(const Problem& q, int m, int tokens, int columns, Share share) {
  return q.batch * ceil_div(m, tokens * wide_along_m(share)) * ceil_div(q.n, columns * wide_along_n(share));
}

// Cycles for m tokens in tiles of so many tokens and weight rows, a fit to timings of an H200: 128 bytes of k take 256
// and 3 a row, with two halves of tokens 66 and 8 a row (the tensor cores alone 4 a row and half), beginning and end of
// a tile 1,500 and 10 a row, an exchange of sums 1,000.
inline int64_t wide_cycles(const Problem& q, int m, int tokens, int columns, Share share) {
  const int rounds = ceil_div(wide_tiles(q, m, tokens, columns, share), multiprocessors(q.device) / kWideCluster);
  const int chunks = ceil_div(ceil_div(q.k * q.element_size(), 128), share == Share::k ? 2 : 1);
  const int each = tokens == kWideTokens ? 256 + 3 * columns : 66 + 8 * columns;
  return int64_t{rounds} * (chunks * each + 1500 + 10 * columns + (share == Share::k ? 1000 : 0));
}

template <sm90::Operand kType, class Out, class Tile, Sums kSums, Share kShare>
void launch_wide(const Problem& q) {
  constexpr int kAlongM = wide_along_m(kShare), kAlongN = wide_along_n(kShare);
  WideParams p = params_of<WideParams>(q);
  p.m_tiles = ceil_div(q.m, Tile::kTokens * kAlongM) * kAlongM;
  p.n_tiles = ceil_div(q.n, Tile::kColumns * kAlongN) * kAlongN;
  p.tiles = wide_tiles(q, q.m, Tile::kTokens, Tile::kColumns, kShare);
  const int clusters = multiprocessors(q.device) / kWideCluster;
  sm90::LaunchShape shape;
  shape.grid = dim3((kShare == Share::k ? p.tiles : std::min(clusters, p.tiles)) * kWideCluster);
  shape.threads = kWideThreads;
  shape.shared_bytes = Tile::kSharedBytes;
  shape.cluster = kWideCluster;
  sm90::launch_dependent(q.op, q.device, q.stream, wide_kernel<kType, Out, Tile, kSums, kShare>, shape,
                         token_map(q, Tile::kTokens / kAlongN), weight_map(q, Tile::kColumns / kAlongM),
                         result_map(q, kWideBox), p);
}

struct WideChoice {
  int tokens, columns;
  Share share;
  void (*launch)(const Problem&);

  int64_t cycles(const Problem& q, int m) const { return wide_cycles(q, m, tokens, columns, share); }
  // Gated, half of the columns that leave at a time must be whole boxes. Two halves of tokens need half a band of
  // tokens: below, too few blocks that run together read the same weight rows.
  bool takes(const Problem& q, int m) const {
    return (!q.gated() || columns % (2 * kWideBox) == 0) && (tokens == kWideTokens || 2 * m >= kWideBand * kWideTokens);
  }
};

template <sm90::Operand kType, class Out, Sums kSums, Share kShare, class... Tiles>
const WideChoice& fastest(const Problem& q, int m) {
  static constexpr WideChoice kChoices[] = {
      {Tiles::kTokens, Tiles::kColumns, kShare, launch_wide<kType, Out, Tiles, kSums, kShare>}...};
  const WideChoice* best = nullptr;
  for (const WideChoice& c : kChoices)
    if (c.takes(q, m) && (!best || c.cycles(q, m) < best->cycles(q, m))) best = &c;
  return *best;
}

// Weights of few rows, up to kWideTokens tokens: k shared where that is faster.
template <sm90::Operand kType, class Out, Sums kSums, class... Tiles>
void wide(const Problem& q) {
  if (q.m <= kWideTokens && q.k >= 1024 && !q.gated()) {
    const WideChoice& shared = fastest<kType, Out, kSums, Share::k, WideTile<64>>(q, kWideTokens);
    const WideChoice& whole = fastest<kType, Out, kSums, Share::tokens, Tiles...>(q, kWideTokens);
    if (shared.cycles(q, kWideTokens) < whole.cycles(q, kWideTokens)) return shared.launch(q);
  }
  fastest<kType, Out, kSums, Share::tokens, Tiles...>(q, q.m).launch(q);
}

// The tile does not change bits; whether k is shared does, and how long the tensor cores add: these follow from n, k
// and whether there are more than kWideTokens tokens, of 16-bit operands also more than kWideFew.
template <class Out>
void wide_fp8(const Problem& q) {
  constexpr auto kType = sm90::Operand::e4m3;
  if (q.block_w)
    return wide<kType, Out, Sums::blocks, WideTile<192>, WideTile<128, 2, true>, WideTile<160>, WideTile<128>,
                WideTile<96>, WideTile<64>>(q);
  if (!q.fast || q.m <= kWideTokens)
    return wide<kType, Out, Sums::exact, WideTile<192>, WideTile<128, 2, true>, WideTile<160>, WideTile<128>,
                WideTile<96>, WideTile<64>>(q);
  fastest<kType, Out, Sums::fast, Share::weight, WideTile<256, 1, true>, WideTile<224>, WideTile<192>, WideTile<128>,
          WideTile<96>, WideTile<64>>(q, q.m)
      .launch(q);
}

// 16-bit operands, of which the tensor cores' sums keep what float32 keeps. Up to kWideFew tokens there may be too few
// tiles for all multiprocessors, unless k is shared.
constexpr int kWideFew = 2 * kWideTokens;

template <sm90::Operand kType, class Out>
void wide_halves(const Problem& q) {
  if (q.m <= kWideTokens) return wide<kType, Out, Sums::fast, WideTile<128>, WideTile<64>>(q);
  constexpr auto whole =
      fastest<kType, Out, Sums::fast, Share::weight, WideTile<256>, WideTile<192>, WideTile<128>, WideTile<64>>;
  if (q.m <= kWideFew && q.k >= 1024 && !q.gated()) {
    const WideChoice& shared = fastest<kType, Out, Sums::fast, Share::k, WideTile<128>, WideTile<64>>(q, kWideFew);
    if (shared.cycles(q, kWideFew) < whole(q, kWideFew).cycles(q, kWideFew)) return shared.launch(q);
  }
  whole(q, q.m).launch(q);
}

}  // namespace radix::gemm
