// Tiles of the kernel for sorted pairs: their sizes, their order, and what a launch passes.
#pragma once

#include "sm90/common/limits.cuh"
#include "sm90/experts/fp8_weights.cuh"

namespace radix::experts {

constexpr int kGroupedSwapAbThreads = 384, kTileRows = 128;
static_assert(kGroupedSwapAbThreads == 3 * sm90::kWarpgroup, "a producer warpgroup and two consumers");
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of a thread, after setmaxnreg
static_assert(sm90::registers_fit(1, kProducerRegisters, 2, kConsumerRegisters));
static_assert(kTileRows == 2 * sm90::kWgmmaRows, "64 weight rows a consumer");

struct GroupedSwapAbParams {
  // [named]: the places of an expert's pairs. Or, with `room`: so many places each, of which `ends` counts those used.
  const int32_t *begins, *ends;
  int room;
  const int32_t* rows;  // where not gated: row of the result for a place; null: the place
  const int32_t* map;   // [named], or null
  int named;
  int n, row_tiles, chunks;  // result columns; tiles of a cluster along them; chunks of 128 bytes of k
  Scales scales;             // of FP8 weights
  int up_rows;               // rows from a gate row to its up row
  int expert_rows;           // weight rows from one expert to the next; gated: in units of 8
  char* out;
  int64_t out_step;   // elements
  bool placed;        // offsets were there before the kernel ahead began
  bool permuted;      // write in the order for FP8 weights (Format::widened)
  float* out_scales;  // of the gated product's result in FP8: [columns / 128, scale_step]
  int scale_step;
};

// Columns of the tiles for many pairs.
template <Format kFormat>
constexpr int kMostColumns = kFormat == Format::half      ? 256
                             : kFormat == Format::widened ? 128
                                                          : 192;

template <Format kFormat_, bool kGated_, int kMaxColumns_, int kCluster_ = 1>
struct GroupedSwapAbTile {
  static constexpr Format kFormat = kFormat_;
  static constexpr bool kGated = kGated_, kQuantizes = kGated && kFormat == Format::fp8;
  static constexpr int kMaxColumns = kMaxColumns_, kCluster = kCluster_;
  // Of k a stage; x comes in parts of 128 bytes.
  static constexpr int kChunk = kFormat == Format::half ? 64 : 128, kPartK = kFormat == Format::fp8 ? 128 : 64;
  static constexpr int kParts = kChunk / kPartK;
  static constexpr int kBox = kMaxColumns > 64 ? 32 : 16;  // pairs a copy
  static constexpr int kWeightBytes = kTileRows * 128, kPartBytes = kMaxColumns * 128;
  static constexpr int kStageBytes = kWeightBytes + kParts * kPartBytes;
  // Scales of a stage's pairs: a copy begins at a multiple of 16 bytes, so that there are up to 3 before the first.
  static constexpr int kScaleBox = kMaxColumns + 4;
  static constexpr int kScaleBytes = kFormat == Format::fp8 ? (kScaleBox * 4 + 127) / 128 * 128 : 0;
  static constexpr int kFit = (192 << 10) / kStageBytes, kStages = kFit < 8 ? kFit : 8;
  // A quantised result has a scale for 128 columns: two runs of 128 weight rows, one after the other.
  static constexpr int kRuns = kQuantizes ? 2 : 1;
  static constexpr int kFeatures = kGated && !kQuantizes ? 64 : 128;  // result columns of a tile
  static constexpr int kPieces = kFeatures / (kQuantizes ? 8 : 16);   // of 16 bytes, staged of a pair by whom below
  static constexpr int kStaged = kQuantizes ? kMaxColumns : 64;       // pairs
  static constexpr int kStagingBytes = kStaged * kPieces * 16;        // of a warpgroup; of both where it quantises
  static constexpr int kSharedBytes =
      kStages * (kStageBytes + kScaleBytes) + (kQuantizes ? 1 : 2) * kStagingBytes + 1024;

  static_assert(kMaxColumns == 64 || kMaxColumns == 128 || kMaxColumns == 192 || kMaxColumns == 256,
                "what GroupedSwapAbConsumer::run() has products for");
  static_assert(kMaxColumns <= kMostColumns<kFormat>, "more sums than a consumer has registers for");
  static_assert(kMaxColumns % kBox == 0 && kBox <= sm90::kMaxBox && kTileRows <= sm90::kMaxBox, "whole TMA boxes");
  static_assert(!kScaleBytes || kScaleBox <= sm90::kMaxBox, "the scales of a stage's pairs are one TMA box");
  static_assert(kCluster == 1 || kCluster == 2);
  static_assert(kWeightBytes % sm90::kSwizzleAtom == 0 && kPartBytes % sm90::kSwizzleAtom == 0, "swizzled operands");
  static_assert(kBox * sm90::kSwizzleBytes % sm90::kSwizzleAtom == 0, "a box begins an atom of the swizzle");
  static_assert(kStages >= 2, "the ring needs a stage to fill beside the one that is read");
  static_assert(kStaged % 16 == 0 && (kQuantizes || kStaged <= kMaxColumns), "results are staged 16 pairs at a time");

  // The instruction's columns, of these the fewest that hold the pairs.
  static __device__ constexpr int columns(int count) {
    if constexpr (kMaxColumns <= 64) return count <= 16 ? 16 : count <= 32 ? 32 : 64;
    const int most = count <= 128 ? 128 : count <= 144 ? 144 : count <= 192 ? 192 : 256;
    return count <= 64 ? 64 : count <= 96 ? 96 : most;
  }
};

// The tiles of all experts.
struct Schedule {
  int begins[kMaxExperts], ends[kMaxExperts];
  int first[kMaxExperts + 1];  // blocks of pairs before each expert

  // By one warp. Params: begins, ends, room and named as in GroupedSwapAbParams.
  template <class Params>
  __device__ void find(const Params& p, int max_columns) {
    const int lane = threadIdx.x % 32, run = (p.named + 31) / 32, begin = lane * run;
    for (int e = lane; e < p.named; e += 32) {
      begins[e] = p.room ? e * p.room : p.begins[e];
      ends[e] = p.room ? e * p.room + max(0, min(p.ends[e], p.room)) : p.ends[e];
    }
    __syncwarp();
    const auto blocks = [&](int e) { return (ends[e] - begins[e] + max_columns - 1) / max_columns; };
    int own = 0;
    for (int e = begin; e < min(begin + run, p.named); e++) own += blocks(e);
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += before;
    }
    if (lane == 31) first[p.named] = sum;
    sum -= own;
    for (int e = begin; e < min(begin + run, p.named); e++) {
      first[e] = sum;
      sum += blocks(e);
    }
  }
};

struct TilePlace {
  int expert, row_tile, begin, count;  // places begin .. begin + count - 1

  template <class Tile, class Params>
  __device__ static TilePlace find(const Schedule& s, const Params& p, int tile, int rank) {
    const int block = tile / p.row_tiles;
    int low = 0, high = p.named;  // first[low] <= block < first[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (s.first[middle] <= block ? low : high) = middle;
    }
    const int blocks = s.first[low + 1] - s.first[low], at = tile - s.first[low] * p.row_tiles;
    const int all = s.ends[low] - s.begins[low], most = Tile::kMaxColumns;
    // Evenly, or full tiles and a rest: what takes fewer columns.
    const int even = (all + blocks - 1) / blocks, rest = all - (blocks - 1) * most;
    const bool full = (blocks - 1) * most + Tile::columns(rest) < blocks * Tile::columns(even);
    TilePlace place;
    const int each = full ? most : even, index = at % blocks;
    place.row_tile = at / blocks * Tile::kCluster + rank;
    place.begin = s.begins[low] + index * each;
    place.count = min(each, s.ends[low] - place.begin);
    place.expert = p.map ? p.map[low] : low;
    return place;
  }
};

}  // namespace radix::experts
