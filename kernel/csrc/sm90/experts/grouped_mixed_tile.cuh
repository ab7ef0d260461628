// Tiles of the experts' products over weights of 4 bits: their sizes, and what a launch passes.
#pragma once

#include "sm90/common/limits.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/experts/grouped_swap_ab_tile.cuh"
#include "sm90/experts/mixed_problem.cuh"

namespace radix::experts {

using linear::Code;

struct GroupedMixedParams {
  const int32_t *begins, *ends;  // [named]: the places of an expert's pairs
  static constexpr int room = 0;
  const int32_t* map;  // [named], or null
  int named;
  MixedWeights weights;
  int rows, row_tiles;  // of an expert's weight; tiles along them
  int second_row;       // from the first row of a tile's first warpgroup to that of the second
  int chunks;           // of 128 of k
  MixedBias bias;
  MixedActivation activation;  // where gated
  char* out;                   // where gated by place, else by pair
  const int32_t* sorted;       // where not gated: the pair of a place
  int n;                       // its columns
  bool placed;                 // offsets were there before the kernel ahead began
  DType scale_type;
};

template <class T_, Code kCode_, int kGroup_, bool kGated_, int kMaxColumns_>
struct GroupedMixedTile {
  using T = T_;
  static constexpr Code kCode = kCode_;
  static constexpr int kGroup = kGroup_, kMaxColumns = kMaxColumns_, kCluster = 1;
  static constexpr bool kGated = kGated_;
  // Powers of two go into the weights where T holds every product exactly.
  static constexpr bool kFolded = kCode == Code::e2m1 && __is_same(T, bf16);

  static constexpr int kChunk = 128, kTilesOfChunk = kChunk / linear::kTileK;  // of k a stage
  static constexpr int kGroupsOfChunk = kChunk / kGroup;
  static constexpr int kGroupsOfTile = kGroup < linear::kTileK ? linear::kTileK / kGroup : 1;
  static constexpr int kStepsOfGroup = 4 / kGroupsOfTile;  // steps of 16 of k within a tile
  static constexpr int kBox = kMaxColumns > 64 ? 32 : 16;  // pairs a copy

  // A stage: x in two parts of 128 bytes a pair, then of each warpgroup the codes, the scales and the zero points.
  static constexpr int kPartBytes = kMaxColumns * 128;
  static constexpr int kCodeBytes = kTilesOfChunk * linear::tile_bytes(kCode);
  static constexpr int kScaleBytes = kGroupsOfChunk * linear::kTileRows * (kCode == Code::e2m1 ? 1 : 4);
  static constexpr int kZeroBytes = kCode == Code::e2m1 ? 0 : kGroupsOfChunk * linear::kTileRows;
  static constexpr int kCodesAt = kTilesOfChunk * kPartBytes;
  static constexpr int kScalesAt = kCodesAt + 2 * kCodeBytes;
  static constexpr int kZerosAt = kScalesAt + 2 * kScaleBytes;
  static constexpr int kStageBytes = (kZerosAt + 2 * kZeroBytes + 1023) / 1024 * 1024;

  // A gated tile is 64 gate rows and their 64 up rows.
  static constexpr int kFeatures = kGated ? 64 : 128;  // result columns of a tile
  static constexpr int kPieces = 64 / 8;               // of 16 bytes, of a pair and a warpgroup
  static constexpr int kStaged = 64;                   // pairs
  static constexpr int kStagingBytes = kStaged * kPieces * 16;
  static constexpr int kExchangeBytes = kGated ? 2 * (kMaxColumns / 4) * 128 * 4 : 0;
  static constexpr int kEpilogueBytes = kExchangeBytes > 2 * kStagingBytes ? kExchangeBytes : 2 * kStagingBytes;
  static constexpr int kFit = ((212 << 10) - kEpilogueBytes) / kStageBytes, kStages = kFit < 8 ? kFit : 8;
  static constexpr int kSharedBytes = kStages * kStageBytes + kEpilogueBytes + 1024;

  static_assert(kGroup == 32 || kGroup == 64 || kGroup == 128, "a chunk has whole groups");
  static_assert(kCode != Code::e2m1 || kGroup == 32, "MXFP4 has groups of 32");
  static_assert(linear::kTileRows == sm90::kWgmmaRows && linear::kTileK == 64, "a packed tile is one operand, 4 steps");
  static_assert(kMaxColumns == 64 || kMaxColumns == 128, "what GroupedMixedConsumer::run() has products for");
  static_assert(kMaxColumns % kBox == 0 && kBox <= sm90::kMaxBox, "whole TMA boxes");
  static_assert(kPartBytes % sm90::kSwizzleAtom == 0 && kBox * 128 % sm90::kSwizzleAtom == 0, "swizzled operands");
  static_assert(kStages >= 3, "two stages are on their way while one is multiplied");

  // The instruction's columns, of these the fewest that hold the pairs.
  static __device__ constexpr int columns(int count) {
    if constexpr (kMaxColumns <= 64) return count <= 16 ? 16 : count <= 32 ? 32 : 64;
    return count <= 64 ? 64 : count <= 96 ? 96 : 128;
  }
};

}  // namespace radix::experts
