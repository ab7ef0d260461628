// Tiles of the wide kernel: their sizes, their order, and what a launch passes.
#pragma once

#include <algorithm>

#include "cuda/gemm/epilogue.h"

namespace radix::gemm {

constexpr int kWideTokens = 128;  // of a tile
constexpr int kWideThreads = 384;
constexpr int kWideCluster = 2;
constexpr int kWideBox = 32;   // columns of the result that one TMA store moves
constexpr int kWideBand = 16;  // tiles along m that share the weight in L2, and whose x stays there

struct WideParams {
  int m, n, m_tiles, n_tiles, chunks;  // n: weight rows; n_tiles: a multiple of the cluster where it shares tokens
  int tiles;                           // of the clusters, of all matrices of the batch
  bool static_weight;                  // may be read before the kernel ahead has ended
  bool gated;                          // the weight's map interleaves 8 gate rows and 8 up rows (not block-scaled)
  int up_offset, row_step;             // as NarrowParams
  const float* block_x;                // scales [m, chunks], or null
  const float* block_w;                // [weight rows / 128, chunks]
  int64_t block_x_step, block_x_unit, block_w_step;
  Epilogue epilogue;
};

// kColumns: weight rows of a tile.
template <int kColumns>
struct WideTile {
  static constexpr int kTokenBytes = kWideTokens * 128, kStageBytes = kTokenBytes + kColumns * 128;
  static constexpr int kStages = kColumns <= 64 ? 8 : kColumns <= 96 ? 7 : kColumns <= 128 ? 6 : 5;
  // Results leave so many columns at a time: large tiles leave no room for more beside their stages.
  static constexpr int kRound = kColumns == 128 || kColumns == 192 ? 64 : kColumns;
  static constexpr int kOutBytes = 64 * kRound * 2;  // of a warpgroup: 64 rows
  // Per stage with scales of blocks: 128 tokens' and those of up to two blocks of rows; else scale and bias of columns.
  static constexpr int kScales = kWideTokens + 4, kScaleBytes = std::max(kStages * kScales * 4, kColumns * 8);
  static constexpr int kSharedBytes = kStages * kStageBytes + 2 * kOutBytes + kScaleBytes + 1024;
};

struct WidePlace {
  int m_tile, n_tile, batch;
};
// Bands of kWideBand tiles along m; within a band m first. Blocks that share k have one tile, others two along n.
template <bool kShareK>
__device__ inline WidePlace wide_place(const WideParams& p, int tile, int rank) {
  const int width = kShareK ? 1 : kWideCluster, pairs = p.n_tiles / width;
  const int matrix = p.m_tiles * pairs, batch = tile / matrix;
  tile -= batch * matrix;
  const int band = tile / (kWideBand * pairs), first = band * kWideBand, rows = min(kWideBand, p.m_tiles - first);
  tile -= first * pairs;
  return {first + tile % rows, tile / rows * width + (kShareK ? 0 : rank), batch};
}

}  // namespace radix::gemm
