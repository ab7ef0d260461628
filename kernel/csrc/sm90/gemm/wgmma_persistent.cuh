// Choice of the persistent kernel's tile: the one that takes the least time, by a model of it.
#pragma once

#include "sm90/gemm/problem.cuh"
#include "sm90/gemm/tensor_maps.cuh"
#include "sm90/gemm/wgmma_persistent_kernel.cuh"
#include "sm90/gemm/wgmma_swap_ab_tiles.cuh"

namespace radix::gemm {

inline int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

inline int persistent_tiles(const Problem& q, int m, int tokens, int columns, Share share) {
  return q.batch * ceil_div(m, tokens * tiles_along_m(share)) * ceil_div(q.n, columns * tiles_along_n(share));
}

// Cycles for m tokens in tiles of so many tokens and weight rows, a fit to timings of an H200: 128 bytes of k take 256
// and 3 a row, with two halves of tokens 66 and 8 a row (the tensor cores alone 4 a row and half), beginning and end of
// a tile 1,500 and 10 a row, an exchange of sums 1,000.
inline int64_t persistent_cycles(const Problem& q, int m, int tokens, int columns, Share share) {
  const int rounds =
      ceil_div(persistent_tiles(q, m, tokens, columns, share), multiprocessors(q.device) / kPersistentCluster);
  const int chunks = ceil_div(ceil_div(q.k * q.element_size(), 128), share == Share::k ? 2 : 1);
  const int each = tokens == kPersistentTokens ? 256 + 3 * columns : 66 + 8 * columns;
  return int64_t{rounds} * (chunks * each + 1500 + 10 * columns + (share == Share::k ? 1000 : 0));
}

template <sm90::Operand kType, class Out, class Tile, Sums kSums, Share kShare>
void launch_persistent(const Problem& q) {
  constexpr int kAlongM = tiles_along_m(kShare), kAlongN = tiles_along_n(kShare);
  auto p = params_of<ParamsOf<kType, PersistentParams>>(q);
  p.m_tiles = ceil_div(q.m, Tile::kTokens * kAlongM) * kAlongM;
  p.n_tiles = ceil_div(q.n, Tile::kColumns * kAlongN) * kAlongN;
  p.tiles = persistent_tiles(q, q.m, Tile::kTokens, Tile::kColumns, kShare);
  const int clusters = multiprocessors(q.device) / kPersistentCluster;
  const sm90::TensorMap x_map = token_map(q, Tile::kTokens / kAlongN);
  const int last = q.m % Tile::kTokens;  // rows; none: all tiles are whole, and the map below is not used
  sm90::LaunchShape shape;
  shape.grid = dim3((kShare == Share::k ? p.tiles : std::min(clusters, p.tiles)) * kPersistentCluster);
  shape.threads = kPersistentThreads;
  shape.shared_bytes = Tile::kSharedBytes;
  shape.cluster = kPersistentCluster;
  sm90::launch_dependent(q.op, q.device, q.stream, wgmma_persistent_kernel<kType, Out, Tile, kSums, kShare>, shape,
                         x_map, last ? token_map(q, last_box_rows(kShare, last)) : x_map,
                         weight_map(q, Tile::kColumns / kAlongM), result_map(q, kStoreBoxColumns), p);
}

struct PersistentChoice {
  int tokens, columns;
  Share share;
  void (*launch)(const Problem&);

  int64_t cycles(const Problem& q, int m) const { return persistent_cycles(q, m, tokens, columns, share); }
  // Gated, half of the columns that leave at a time must be whole boxes. Two halves of tokens need half a band of
  // tokens: below, too few blocks that run together read the same weight rows.
  bool takes(const Problem& q, int m) const {
    return (!q.gated() || columns % (2 * kStoreBoxColumns) == 0) &&
           (tokens == kPersistentTokens || 2 * m >= kTileBand * kPersistentTokens);
  }
};

template <sm90::Operand kType, class Out, Sums kSums, Share kShare, class... Tiles>
const PersistentChoice& fastest(const Problem& q, int m) {
  static constexpr PersistentChoice kChoices[] = {
      {Tiles::kTokens, Tiles::kColumns, kShare, launch_persistent<kType, Out, Tiles, kSums, kShare>}...};
  const PersistentChoice* best = nullptr;
  for (const PersistentChoice& c : kChoices)
    if (c.takes(q, m) && (!best || c.cycles(q, m) < best->cycles(q, m))) best = &c;
  return *best;
}

// Weights of few rows, up to kPersistentTokens tokens: k shared where that is faster.
template <sm90::Operand kType, class Out, Sums kSums, class... Tiles>
const PersistentChoice& split_k_or_fastest(const Problem& q) {
  if (q.m <= kPersistentTokens && q.k >= 1024 && !q.gated()) {
    const PersistentChoice& shared = fastest<kType, Out, kSums, Share::k, PersistentTile<64>>(q, kPersistentTokens);
    const PersistentChoice& whole = fastest<kType, Out, kSums, Share::tokens, Tiles...>(q, kPersistentTokens);
    if (shared.cycles(q, kPersistentTokens) < whole.cycles(q, kPersistentTokens)) return shared;
  }
  return fastest<kType, Out, kSums, Share::tokens, Tiles...>(q, q.m);
}

// The tile does not change bits; whether k is shared does, and how long the tensor cores add: these follow from n, k
// and whether there are more than kPersistentTokens tokens, of 16-bit operands also more than kSplitKTokens.
template <class Out>
void persistent_fp8(const Problem& q) {
  constexpr auto kType = sm90::Operand::e4m3;
  if (q.block_w)
    return split_k_or_fastest<kType, Out, Sums::blocks, PersistentTile<192>, PersistentTile<128, 2, true>,
                              PersistentTile<160>, PersistentTile<128>, PersistentTile<96>, PersistentTile<64>>(q)
        .launch(q);
  if (!q.fast || q.m <= kPersistentTokens)
    return split_k_or_fastest<kType, Out, Sums::exact, PersistentTile<192>, PersistentTile<128, 2, true>,
                              PersistentTile<160>, PersistentTile<128>, PersistentTile<96>, PersistentTile<64>>(q)
        .launch(q);
  fastest<kType, Out, Sums::fast, Share::weight, PersistentTile<256, 1, true>, PersistentTile<224>, PersistentTile<192>,
          PersistentTile<128>, PersistentTile<96>, PersistentTile<64>>(q, q.m)
      .launch(q);
}

// Of INT8 the tensor cores' sums are exact: neither the tile nor a shared k changes bits.
template <class Out>
void persistent_int8(const Problem& q) {
  constexpr auto kType = sm90::Operand::s8;
  if (q.m <= kPersistentTokens)
    return split_k_or_fastest<kType, Out, Sums::fast, PersistentTile<256, 1, true>, PersistentTile<224>,
                              PersistentTile<192>, PersistentTile<128>, PersistentTile<96>, PersistentTile<64>>(q)
        .launch(q);
  fastest<kType, Out, Sums::fast, Share::weight, PersistentTile<256, 1, true>, PersistentTile<224>, PersistentTile<192>,
          PersistentTile<128>, PersistentTile<96>, PersistentTile<64>>(q, q.m)
      .launch(q);
}

// 16-bit operands, of which the tensor cores' sums keep what float32 keeps. Up to kSplitKTokens tokens there may be too
// few tiles for all multiprocessors, unless k is shared.
constexpr int kSplitKTokens = 2 * kPersistentTokens;

template <sm90::Operand kType, class Out>
const PersistentChoice& persistent_16bit_choice(const Problem& q) {
  if (q.m <= kPersistentTokens)
    return split_k_or_fastest<kType, Out, Sums::fast, PersistentTile<128>, PersistentTile<64>>(q);
  constexpr auto whole = fastest<kType, Out, Sums::fast, Share::weight, PersistentTile<256>, PersistentTile<192>,
                                 PersistentTile<128>, PersistentTile<64>>;
  if (q.m <= kSplitKTokens && q.k >= 1024 && !q.gated()) {
    const PersistentChoice& shared =
        fastest<kType, Out, Sums::fast, Share::k, PersistentTile<128>, PersistentTile<64>>(q, kSplitKTokens);
    if (shared.cycles(q, kSplitKTokens) < whole(q, kSplitKTokens).cycles(q, kSplitKTokens)) return shared;
  }
  return whole(q, q.m);
}

// Up to kSwapAbManyTokens tokens the swap-AB kernel too, whose tile has as many rows of x as there are: tiles of 128
// take as long for one token more than 128 as for 256.
template <sm90::Operand kType, class Out>
void persistent_16bit(const Problem& q) {
  const PersistentChoice& choice = persistent_16bit_choice<kType, Out>(q);
  const int share = swap_ab_many_share(q, choice.cycles(q, q.m));
  share > 0 ? wgmma_swap_ab_many<Out>(q, share) : choice.launch(q);
}

template <class In, class Out>
void wgmma_persistent(const Problem& q) {
  if constexpr (__is_same(In, e4m3)) {
    persistent_fp8<Out>(q);
  } else if constexpr (__is_same(In, int8_t)) {
    persistent_int8<Out>(q);
  } else {
    persistent_16bit<sm90::kOperand<In>, Out>(q);
  }
}

}  // namespace radix::gemm
