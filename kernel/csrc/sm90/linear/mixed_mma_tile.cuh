// The shape of a mixed_mma tile, its shared memory, and what the kernel is told of a product (mixed_mma_kernel.cuh).
//
// Shared memory (dynamic; the barriers are static):
//
//   | x        | kXStages x kStageTiles x [kTokens, 128 bytes], swizzled |
//   | partials | [kKWarps][kTokens][kColumnStep] floats                  |
#pragma once

#include <algorithm>

#include "sm90/common/limits.cuh"
#include "sm90/gemm/epilogue.cuh"
#include "sm90/linear/layout.cuh"

namespace radix::linear {

using gemm::Epilogue;
using gemm::Gate;

// A packed weight as its codes are read, or the first of several.
struct MixedForm {
  const char *codes, *scales, *zeros;  // zeros may be null
  int k_tiles, numbers;                // of a row; scales as they are stored (layout.cuh)
  DType scale_type;
  int scale_bytes;  // of one of these
  bool by_rows;     // one group a row
};

// Strips are counted in units: a strip, or (Gate::halves) a strip of gates and its strip of ups.
struct MixedParams : MixedForm {
  bool x_by_tiles;  // the map of x has a dimension of its own for tiles of k
  int m, columns;   // columns of the result
  int units, tile_units, tiles;
  int up_strips;  // from a strip of gates to its ups, else 0
  bool static_weight;
  Epilogue epilogue;
};

constexpr int kMostXStages = 16;
constexpr int kWholeRows = 128;  // the size of groups that also stands for one group a row

// Tiles of k that a warp multiplies in a round: as many as registers hold twice, their codes and numbers. kFolded:
// where scales need no sums of their own.
template <Code kCode, int kGroup, int kTokens, bool kFolded = false>
constexpr int round_tiles() {
  if (kTokens > 16) return kGroup == 128 || kFolded ? 2 : 1;
  return kCode == Code::s8 || (kCode == Code::u4 && kGroup < 128) ? 2 : 4;
}

// kRowWarps x kKWarps warps, each of kUnits strips and, in turn, of kRound tiles of k. kGroup: 32, 64, or kWholeRows.
// kMostStages: of x.
template <Code kCode_, int kGroup_, int kTokens_, int kRowWarps_, int kKWarps_, int kUnits_, int kRound_,
          int kMostStages = kMostXStages>
struct MixedTile {
  static constexpr Code kCode = kCode_;
  static constexpr int kGroup = kGroup_, kTokens = kTokens_;
  static constexpr int kRowWarps = kRowWarps_, kKWarps = kKWarps_, kUnits = kUnits_, kRound = kRound_;
  static constexpr int kStrips = kRowWarps * kUnits;
  static constexpr int kWarps = kRowWarps * kKWarps, kConsumers = kWarps * 32;
  // Whole warpgroups of consumers take registers from the producer's; what all have is what the block is launched with.
  // Seven warps and a producer can have 255 as they are.
  static constexpr bool kShareRegisters = kWarps % 4 == 0;
  static constexpr int kThreads = kConsumers + (kShareRegisters ? sm90::kWarpgroup : 32);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = kWarps == 16 ? 112 : 232;
  static constexpr int kLaunchRegisters = sm90::kSmRegisters / kThreads / 8 * 8;
  static_assert(!kShareRegisters ||
                kConsumers * kConsumerRegisters + sm90::kWarpgroup * kProducerRegisters <= kThreads * kLaunchRegisters);
  // Of a round: its groups, and a lane's pieces of 16 bytes of codes and its words of scales. e2m1 has those of a
  // tile's two groups and both rows in one word.
  static constexpr int kRoundGroups = kRound * kTileK / kGroup;
  static constexpr bool kSharedScales = kCode == Code::e2m1;
  static constexpr int kRoundScales = kSharedScales ? kRound : kRoundGroups, kScaleWords = kSharedScales ? 1 : 2;
  static constexpr int kTilePieces = strip_bytes(kCode) / 512, kRoundPieces = kRound * kTilePieces;
  // All the warps' tiles of k in one round are a stage of x.
  static constexpr int kStageTiles = kKWarps * kRound;
  static constexpr int kXBytes = kTokens * 128, kXStageBytes = kStageTiles * kXBytes;
  static constexpr int kColumnStep = kStrips * 16 + 4;  // floats of a token; 4: banks
  static constexpr int kPartialBytes = kKWarps * kTokens * kColumnStep * 4;
  // As many stages as there is room for: all warps wait for each.
  static constexpr int kFixedBytes = kPartialBytes + 1024;
  static constexpr int kXStages = std::min(kMostStages, (sm90::kMaxSharedBytes - kFixedBytes) / (kXStageBytes + 2 * 8));
  static constexpr int kSharedBytes = kXStages * kXStageBytes + kFixedBytes;

  static_assert(kXStages >= 3, "x is loaded ahead of the products");
  static_assert(kTokens % 8 == 0 && kTokens >= 8 && kTokens <= 32, "columns of the product, and a TMA box");
  static_assert(kGroup >= 32 && kRound * kTileK % kGroup == 0, "a round is of whole groups, a group of half tiles");
  static_assert(!kSharedScales || kGroup == kTileK / 2, "a tile has two groups");
  static_assert(kUnits == 1 || kUnits == 2, "a gate strip and its up strip are one warp's, or neighbours'");
  static_assert(kStrips % 2 == 0, "a gate strip and its up strip are in one tile");
  static_assert(kThreads <= sm90::kMaxThreads && kXBytes % sm90::kSwizzleAtom == 0 && kPartialBytes % 16 == 0);
  static_assert(sm90::shared_fits(kSharedBytes + 2 * kXStages * 8), "the barriers are static");

  // The strip in slot `slot` of a tile of `here` units from `first` on, or -1. up_strips: from gates to ups, or 0.
  __device__ static int strip_of(int first, int here, int up_strips, int slot) {
    const int unit = up_strips ? slot / 2 : slot;
    if (unit >= here) return -1;
    return first + unit + (up_strips && slot % 2 ? up_strips : 0);
  }
  // Rounds of a tile.
  __device__ static int rounds(const MixedForm& p) { return (p.k_tiles + kStageTiles - 1) / kStageTiles; }
};

// The way of blocks through the tiles of one weight. Where there are several (kStacked) it also has weight(tile), which
// one a tile is of, and offset(weight), its bytes from the first.
template <class Tile>
class MixedWalk {
 public:
  static constexpr bool kStacked = false;

  __device__ explicit MixedWalk(const MixedParams& p) : p_(p) {}
  __device__ const MixedForm& form() const { return p_; }
  // Whether weights are read after the preceding kernel alone.
  __device__ bool waits() const { return !p_.static_weight; }
  __device__ int tiles() const { return p_.tiles; }
  // The strip of tile `tile` in slot `slot` of its strips, or -1.
  __device__ int strip_of(int tile, int slot) const {
    const int first = tile * p_.tile_units;
    return Tile::strip_of(first, min(p_.tile_units, p_.units - first), p_.up_strips, slot);
  }

 private:
  const MixedParams& p_;
};

template <class Tile>
struct MixedShared {
  char* x;                 // [kXStages][kStageTiles][kTokens, 128 bytes]
  float* partials;         // [kKWarps][kTokens][kColumnStep]
  uint64_t *full, *empty;  // [kXStages]
};

}  // namespace radix::linear
