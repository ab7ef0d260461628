// Which kernel, tile and clusters a product of a packed weight and 17 tokens or more takes: estimates in cycles of a
// multiprocessor, whose constants come from times on an H200. Host code, without CUDA.
//
// What shares k, and with it a token's bits, follows from the weight, the gate and the class of tokens: 17 .. 32 and
// 33 .. 64 (one plan, for 64 tokens, where both run on mixed_wgmma), 65 .. 128, and more.
#pragma once

#include <algorithm>
#include <cstdint>

namespace radix::linear {

constexpr int kExactTokens = 16;                    // up to so many mixed_mma multiplies
constexpr int kFewTokens = 32;                      // up to so many, whichever of the two is faster
constexpr int kMostTokens = 1024;                   // of a product with the packed weight itself
constexpr int kTileTokens = 64, kSomeTokens = 128;  // the last of the classes above

// A form of mixed_wgmma's tiles.
struct WgmmaForm {
  int tokens, strips, k_parts;  // up to so many; of 64 weight rows each; warpgroups of a strip, which take k in turn
  int cycles;                   // that a block takes for 64 of k
};
constexpr WgmmaForm kTall = {64, 4, 1, 930}, kLong = {64, 2, 2, 465};
constexpr WgmmaForm kNarrow = {128, 2, 1, 830}, kWide = {256, 2, 1, 1125};

struct PlannedWeight {
  int rows, k_tiles;  // k_tiles: of 64
  bool halves;        // gates, then ups
  bool long_groups;   // of 128, or whole rows
  int tile_bytes;     // of codes of 64 x 64
  int multiprocessors;
};

// Blocks of a cluster: neighbours along the weight's rows, times shares of k; and what the product should take.
struct MixedPlan {
  WgmmaForm form;
  int row_blocks, k_shares;
  int64_t cycles;
};

constexpr int kReadBytes = 24;                                 // from L2 in a cycle, where all multiprocessors read
constexpr int kFillCycles = 5000, kClusterCycles = 500;        // of a launch; of more than two blocks a cluster
constexpr int kEpilogueCycles = 1000, kShareCycles = 1500;     // of 64 tokens; and where k is shared, each halving
constexpr int kMostRowBlocks = 2, kMostShares = 8;             // powers of two
constexpr int kMostBlocks = 8;                                 // of a cluster
constexpr int kMmaFillCycles = 3000, kMmaRoundCycles = 1250;   // mixed_mma above 16 tokens: of a strip a warp
constexpr int kMarginNumerator = 23, kMarginDenominator = 20;  // by which mixed_wgmma must be faster up to kFewTokens

constexpr int ceil_div(int n, int each) {
  return (n + each - 1) / each;
}

constexpr int log2_of(int power) {
  return power > 1 ? 1 + log2_of(power / 2) : 0;
}

// Row tiles of a product: of gate halves a tile has as many ups as gates.
inline int row_tiles_of(const PlannedWeight& w, const WgmmaForm& form) {
  const int parts = w.halves ? 2 : 1;
  return ceil_div(w.rows / parts, form.strips * 64 / parts);
}

// Clusters that surely run at once: those of more than 2 blocks lie within a group of multiprocessors, whose sizes
// differ. On an H200 24 of 4 do and 32 do not, 12 of 8 do and 16 do not.
inline int clusters_of(int multiprocessors, int blocks) {
  return std::max(1, (blocks <= 2 ? multiprocessors : multiprocessors * 3 / 4) / blocks);
}

inline int64_t cycles_of(const PlannedWeight& w, const WgmmaForm& form, int tokens, int row_blocks, int k_shares) {
  const int tiles = ceil_div(row_tiles_of(w, form), row_blocks) * ceil_div(tokens, form.tokens);
  const int blocks = row_blocks * k_shares, clusters = clusters_of(w.multiprocessors, blocks);
  const int rounds = ceil_div(tiles, clusters);
  const int chunk = form.k_parts;
  const int k_tiles = ceil_div(ceil_div(w.k_tiles, k_shares), chunk) * chunk;
  const int bytes = (form.tokens * 128 / row_blocks + form.strips * w.tile_bytes) * blocks;  // of 64 of k, a cluster
  const int read = bytes * std::min(tiles, clusters) / (kReadBytes * w.multiprocessors);
  const int ends = ceil_div(form.tokens, 64) * (kEpilogueCycles + kShareCycles * log2_of(k_shares));
  return kFillCycles + (blocks > 2 ? kClusterCycles : 0) +
         int64_t{rounds} * (int64_t{k_tiles} * std::max(form.cycles, read) + ends);
}

// The fastest clusters of a form, the larger of equal ones, which read less; shares: of k, or 0 to choose them.
inline MixedPlan plan_of(const PlannedWeight& w, const WgmmaForm& form, int tokens, int shares = 0) {
  const int stage_tiles = form.strips == 4 ? 2 : form.k_parts;
  MixedPlan best = {form, 0, 0, INT64_MAX};
  for (int k_shares = 1; k_shares <= kMostShares; k_shares *= 2) {
    if (shares ? k_shares != shares : k_shares > 1 && w.k_tiles < 4 * stage_tiles * k_shares) continue;
    for (int row_blocks = 1; row_blocks <= kMostRowBlocks && row_blocks * k_shares <= kMostBlocks; row_blocks *= 2) {
      const int64_t cycles = cycles_of(w, form, tokens, row_blocks, k_shares);
      if (cycles <= best.cycles) best = {form, row_blocks, k_shares, cycles};
    }
  }
  return best;
}

inline MixedPlan faster_of(const MixedPlan& a, const MixedPlan& b) {
  return b.cycles < a.cycles ? b : a;
}

// Sums of narrow and wide tiles are the same where as many blocks share k.
inline MixedPlan plan_of_many(const PlannedWeight& w, int tokens, int shares) {
  return faster_of(plan_of(w, kNarrow, tokens, shares), plan_of(w, kWide, tokens, shares));
}

// How many share k of a batch of more than 128 tokens: for 256 and 512 of them together.
inline int shares_of_many(const PlannedWeight& w) {
  int best = 1;
  int64_t least = INT64_MAX;
  for (int shares = 1; shares <= kMostShares; shares *= 2) {
    if (shares > 1 && w.k_tiles < 4 * shares) break;
    const int64_t cycles = plan_of_many(w, 256, shares).cycles + plan_of_many(w, 512, shares).cycles;
    if (cycles < least) best = shares;
    least = std::min(least, cycles);
  }
  return best;
}

// The plan of mixed_wgmma.
inline MixedPlan mixed_plan(const PlannedWeight& w, int tokens) {
  if (tokens > kSomeTokens) return plan_of_many(w, tokens, shares_of_many(w));
  const int most = tokens <= kTileTokens ? kTileTokens : kSomeTokens;
  const MixedPlan best = faster_of(plan_of(w, kTall, most), plan_of(w, kLong, most));
  return tokens <= kTileTokens ? best : faster_of(best, plan_of(w, kNarrow, most));
}

// What mixed_mma takes for 17 .. 32 tokens: rounds of tiles of k, which wait for memory.
inline int64_t mma_cycles_of(const PlannedWeight& w) {
  constexpr int kMostStrips = 14;
  const int unit = w.halves ? 2 : 1;
  const int strips = ceil_div(ceil_div(w.rows, 16) / unit, w.multiprocessors) * unit;  // of a multiprocessor
  const int k_warps = strips <= 4 ? 2 : 1, warp_strips = strips <= 8 ? 1 : 2;
  const int rounds = ceil_div(w.k_tiles, k_warps * (w.long_groups ? 2 : 1));
  return kMmaFillCycles + int64_t{ceil_div(strips, kMostStrips)} * rounds * warp_strips * kMmaRoundCycles;
}

// Whether mixed_wgmma multiplies `tokens` tokens.
inline bool takes_wgmma(const PlannedWeight& w, int tokens) {
  if (tokens <= kExactTokens) return false;
  if (tokens > kFewTokens) return true;
  return mixed_plan(w, tokens).cycles * kMarginNumerator <= mma_cycles_of(w) * kMarginDenominator;
}

}  // namespace radix::linear
