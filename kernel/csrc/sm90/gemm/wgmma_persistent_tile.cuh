// Tiles of the persistent kernel: their kinds, their sizes, their order, and what a launch passes.
#pragma once

#include <algorithm>

#include "sm90/common/limits.cuh"
#include "sm90/gemm/epilogue.cuh"

namespace radix::gemm {

using sm90::kMaxSharedBytes;

// How long the tensor cores add, which keep about 14 bits of a sum, before it goes on in float32 registers.
enum class Sums {
  fast,   // over all of k
  exact,  // over 128 of k
  blocks  // over 128 of k, whose sum is then scaled
};

// What the two blocks of a cluster have in common.
enum class Share {
  tokens,  // neighbours along n: each loads half of the tokens, for both
  weight,  // neighbours along m: each loads half of the weight's rows, for both
  k        // the tile: each multiplies half of k, and they exchange half of their sums
};

// Whose weight a tile's tokens are multiplied with.
enum class Weights {
  dense,         // all the same
  grouped,       // that of their group; tokens behind a tile's end are another's, and are not written
  grouped_gated  // the same, and the weight's map interleaves 8 gate rows and 8 up rows
};

constexpr int kPersistentTokens = 128;  // of a tile
constexpr int kPersistentThreads = 384;
constexpr int kPersistentCluster = 2;
constexpr int kStoreBoxColumns = 32;  // columns of the result that one TMA store moves
constexpr int kTileBand = 16;         // tiles along m that share the weight in L2, and whose x stays there

// Tiles of a cluster side by side.
__host__ __device__ constexpr int tiles_along_m(Share share) {
  return share == Share::weight ? kPersistentCluster : 1;
}
__host__ __device__ constexpr int tiles_along_n(Share share) {
  return share == Share::tokens ? kPersistentCluster : 1;
}

// The last tile's `rows` of x, fewer than a tile has, come in one box a block that ends with x's last row: tiles whose
// boxes reached beyond it took longer than full ones. Blocks that share the tokens load a box each, alike in size; the
// second begins at a multiple of 8 rows (the swizzle's), where it may overlap the first: both write the same there.
__host__ __device__ constexpr int last_box_row(Share share, int rows, int rank) {
  return rank * (rows / tiles_along_n(share) / 8 * 8) * (tiles_along_n(share) - 1);
}
__host__ __device__ constexpr int last_box_rows(Share share, int rows) {
  return rows - last_box_row(share, rows, 1);
}
static_assert(last_box_row(Share::tokens, 72, 0) == 0 && last_box_row(Share::tokens, 72, 1) == 32);
static_assert(last_box_rows(Share::tokens, 72) == 40 && last_box_rows(Share::tokens, 7) == 7);
static_assert(last_box_row(Share::k, 72, 1) == 0 && last_box_rows(Share::weight, 72) == 72);

static_assert(kPersistentThreads == 3 * sm90::kWarpgroup, "a producer warpgroup and two consumers");
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of a thread, after setmaxnreg
static_assert(sm90::registers_fit(1, kProducerRegisters, 2, kConsumerRegisters));
static_assert(kPersistentTokens == 2 * sm90::kWgmmaRows, "64 tokens a consumer");
static_assert(kTileBand % kPersistentCluster == 0, "a cluster's tiles lie in one band");

// Whether a tile of so many weight rows, wherever it begins, lies in at most two blocks of 128 rows: as many scales of
// blocks does a consumer hold.
__host__ __device__ constexpr bool within_two_scale_blocks(int columns) {
  for (int first = 0; first < 128 * columns; first += columns)
    if ((first + columns - 1) / 128 - first / 128 > 1) return false;
  return true;
}

struct PersistentParams {
  int m, n, m_tiles, n_tiles, chunks;  // n: weight rows; m_tiles, n_tiles: multiples of the cluster along it
  int tiles;                           // of the clusters, of all matrices of the batch
  bool static_weight;                  // may be read before the kernel ahead has ended
  bool gated;                          // the weight's map interleaves 8 gate rows and 8 up rows (not block-scaled)
  int up_offset, row_step;             // as SwapAbParams
  const float* block_x;                // scales [m, chunks], or null
  const float* block_w;                // [weight rows / 128, chunks]
  int64_t block_x_step, block_x_unit, block_w_step, block_w_matrix;
  Epilogue epilogue;
};

// A tile of kHalves times kPersistentTokens tokens (each warpgroup has 64 of either half) x kColumns weight rows.
// kStaged: all of its results have room, so that none waits until others have left; that costs a stage.
template <int kColumns_, int kHalves_ = 1, bool kStaged = false>
struct PersistentTile {
  static constexpr int kColumns = kColumns_, kHalves = kHalves_, kTokens = kHalves * kPersistentTokens;
  static constexpr int kTokenBytes = kTokens * 128, kStageBytes = kTokenBytes + kColumns * 128;
  static constexpr int kStages = std::min(8, (200 << 10) / kStageBytes) - kStaged;
  // Results leave so many columns at a time, double-buffered where the stages leave room.
  static constexpr int kRound = kColumns % 64 == 0 ? 64 : kColumns % 96 == 0 ? 96 : 32;
  static constexpr int kRounds = kColumns / kRound;
  static constexpr int kOutBytes = 64 * kRound * 2;  // of a warpgroup: 64 rows
  // Per stage with scales of blocks: the tokens' and those of up to four blocks of rows (of gated groups); else scale
  // and bias of columns.
  static constexpr int kScales = kTokens + 4, kScaleBytes = std::max(kStages * kScales * 4, kColumns * 8);
  static constexpr int kBarrierBytes = (2 * kStages + 2) * 8;
  static constexpr int kFixedBytes = kStages * kStageBytes + kScaleBytes + kBarrierBytes;
  static constexpr int kBuffers = kStaged ? kHalves * kRounds : kFixedBytes + 4 * kOutBytes <= kMaxSharedBytes ? 2 : 1;
  static constexpr int kSharedBytes = kFixedBytes + 2 * kBuffers * kOutBytes;
  static_assert(kColumns % 32 == 0 && kColumns <= sm90::kMaxWgmmaColumns, "wgmma's N; a warp stores 32 columns");
  static_assert(kColumns <= sm90::kMaxBox && kTokens <= sm90::kMaxBox, "a stage is one TMA box of each operand");
  static_assert(kHalves == 1 || kHalves == 2);
  static_assert(kHalves * kColumns / 2 <= 128, "sums of a thread");
  static_assert(kRound % kStoreBoxColumns == 0 && kColumns % kRound == 0, "results leave in whole TMA boxes");
  static_assert(kStageBytes % sm90::kSwizzleAtom == 0 && kTokenBytes % sm90::kSwizzleAtom == 0, "swizzled operands");
  static_assert(kOutBytes % 512 == 0, "results lie in the 64-byte swizzle: atoms of 8 rows");
  static_assert(kScaleBytes % 16 == 0, "scales of columns are read in pairs; barriers follow");
  static_assert(kStages >= 2, "the ring needs a stage to fill beside the one that is read");
  static_assert(kBuffers >= 1 && kSharedBytes <= kMaxSharedBytes);
};

// The layout of a block's shared memory.
template <class Tile>
struct PersistentShared {
  char* stages;   // [kStages][kTokens tokens, kColumns weight rows][128 bytes]
  char* results;  // [2 warpgroups][kBuffers][kOutBytes]
  char* scales;   // [kStages][kScales] of blocks, or [kColumns] scale and bias
  uint64_t *full, *empty, *columns_full, *columns_empty;

  __device__ explicit PersistentShared(char* begin) : stages(begin) {
    results = stages + Tile::kStages * Tile::kStageBytes;
    scales = results + 2 * Tile::kBuffers * Tile::kOutBytes;
    full = reinterpret_cast<uint64_t*>(scales + Tile::kScaleBytes);
    empty = full + Tile::kStages;
    columns_full = empty + Tile::kStages;
    columns_empty = columns_full + 1;
  }
  __device__ char* tokens(int stage) const { return stages + stage * Tile::kStageBytes; }
  __device__ char* weight(int stage) const { return tokens(stage) + Tile::kTokenBytes; }
  __device__ float* block_scales(int stage) const { return reinterpret_cast<float*>(scales) + stage * Tile::kScales; }
  __device__ float2* columns() const { return reinterpret_cast<float2*>(scales); }
};

struct TileCoord {
  int row, end;  // the tile's first token, and where those that exist end
  int n_tile;
  int batch, matrix;  // of x and the result; of the weight
};
// Bands of kTileBand tiles along m; within a band m first.
template <Share kShare, class Tile>
__device__ inline TileCoord tile_coord(const PersistentParams& p, int tile, int rank) {
  constexpr int kAlongN = tiles_along_n(kShare), kAlongM = tiles_along_m(kShare);
  const int wide = p.n_tiles / kAlongN, high = p.m_tiles / kAlongM, band = kTileBand / Tile::kHalves / kAlongM;
  const int matrix = wide * high, batch = tile / matrix;
  tile -= batch * matrix;
  const int first = tile / (band * wide) * band, rows = min(band, high - first);
  tile -= first * wide;
  return {((first + tile % rows) * kAlongM + rank / kAlongN % kAlongM) * Tile::kTokens, p.m,
          tile / rows * kAlongN + rank % kAlongN, batch, batch};
}

}  // namespace radix::gemm
