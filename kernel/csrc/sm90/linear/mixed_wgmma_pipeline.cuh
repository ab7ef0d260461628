// What the products of packed weights on wgmma share: their stages in shared memory, and the weights they read.
#pragma once

#include "common/dtype.h"
#include "sm90/common/limits.cuh"
#include "sm90/linear/layout.cuh"

namespace radix::linear {

// A packed weight, or several of one form, one after the other.
struct MixedWeights {
  const char *codes, *scales, *zeros;  // of the first weight; zeros: or null
  int64_t step;                        // bytes from one weight to the next
  int row_tiles, k_tiles, groups;      // of 64 rows, 64 of k; groups along k
  int scale_bytes;                     // of one scale
  DType scale_type;
  int chunks;      // of 128 of k
  int second_row;  // from the first row of a tile's first warpgroup to that of the second
};

inline MixedWeights mixed_weights(const Layout& layout, const char* packed, int64_t step, DType scale_type) {
  MixedWeights w = {};
  w.codes = packed;
  w.scales = packed + layout.scales;
  w.zeros = layout.zeros ? packed + layout.zeros : nullptr;
  w.step = step;
  w.row_tiles = static_cast<int>(layout.row_tiles);
  w.k_tiles = static_cast<int>(layout.k_tiles);
  w.groups = static_cast<int>(layout.groups);
  w.scale_bytes = layout.scale_bytes;
  w.scale_type = scale_type;
  w.chunks = (w.k_tiles + 1) / 2;
  w.second_row = kTileRows;
  return w;
}

constexpr int kMixedThreads = 384;                                          // a producer's warpgroup and two consumers
constexpr int kMixedProducerRegisters = 40, kMixedConsumerRegisters = 232;  // of a thread, after setmaxnreg
static_assert(kMixedThreads == 3 * sm90::kWarpgroup);
static_assert(sm90::registers_fit(1, kMixedProducerRegisters, 2, kMixedConsumerRegisters));

// kGroup: inputs that share a scale; 128 also serves whole rows, whose one scale every 128 take. kMaxColumns: rows of x
// a tile may have. kReserved: bytes of shared memory that the kernel needs beside the stages.
template <class T_, Code kCode_, int kGroup_, int kMaxColumns_, int kReserved>
struct MixedPipeline {
  using T = T_;
  static constexpr Code kCode = kCode_;
  static constexpr int kGroup = kGroup_, kMaxColumns = kMaxColumns_;
  // Powers of two go into the weights where T holds every product exactly.
  static constexpr bool kFolded = kCode == Code::e2m1 && __is_same(T, bf16);

  static constexpr int kChunk = 128, kTilesOfChunk = kChunk / kTileK;  // of k a stage
  static constexpr int kGroupsOfChunk = kChunk / kGroup;
  static constexpr int kGroupsOfTile = kGroup < kTileK ? kTileK / kGroup : 1;
  static constexpr int kStepsOfGroup = kTileK / kStepK / kGroupsOfTile;  // within a tile
  static constexpr int kBox = kMaxColumns > 64 ? 32 : 16;                // rows of x a copy
  static constexpr int kBoxBytes = kBox * sm90::kSwizzleBytes;

  // A stage: x in two parts of 128 bytes a row, then of each warpgroup the codes, the scales and the zero points.
  static constexpr int kPartBytes = kMaxColumns * sm90::kSwizzleBytes;
  static constexpr int kCodeBytes = kTilesOfChunk * tile_bytes(kCode);
  static constexpr int kScaleBytes = kGroupsOfChunk * kTileRows * (kCode == Code::e2m1 ? 1 : 4);
  static constexpr int kZeroBytes = kCode == Code::u4 ? kGroupsOfChunk * kTileRows : 0;
  static constexpr int kCodesAt = kTilesOfChunk * kPartBytes;
  static constexpr int kScalesAt = kCodesAt + 2 * kCodeBytes;
  static constexpr int kZerosAt = kScalesAt + 2 * kScaleBytes;
  static constexpr int kStageBytes = (kZerosAt + 2 * kZeroBytes + 1023) / 1024 * 1024;
  static constexpr int kAlignment = 1024, kBarrierBytes = 256;
  static constexpr int kFit = (sm90::kMaxSharedBytes - kAlignment - kBarrierBytes - kReserved) / kStageBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;

  static_assert(kGroup == 32 || kGroup == 64 || kGroup == 128, "a chunk has whole groups");
  static_assert(kCode != Code::e2m1 || kGroup == 32, "MXFP4 has groups of 32");
  static_assert(kTileRows == sm90::kWgmmaRows && kTileK == 64, "a packed tile is one operand, a part of x its k");
  static_assert(kMaxColumns == 64 || kMaxColumns == 128, "tiles of more have sums beyond the registers");
  static_assert(kMaxColumns % kBox == 0 && kBox <= sm90::kMaxBox, "whole TMA boxes");
  static_assert(kPartBytes % sm90::kSwizzleAtom == 0 && kBoxBytes % sm90::kSwizzleAtom == 0, "swizzled operands");
  static_assert(2 * kStages * 8 <= kBarrierBytes, "a full and an empty barrier a stage");
  static_assert(kStages >= 3, "two stages are on their way while one is multiplied");
};

}  // namespace radix::linear
