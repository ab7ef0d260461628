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
  int row_tiles, k_tiles, numbers;     // of 64 rows, 64 of k; scales along k, as they are stored (layout.cuh)
  int scale_bytes;                     // of one of these
  DType scale_type;
  int second_row;  // from the first row of a tile's first half of strips to that of the second
};

inline MixedWeights mixed_weights(const Layout& layout, const char* packed, int64_t step, DType scale_type) {
  MixedWeights w = {};
  w.codes = packed;
  w.scales = packed + layout.scales;
  w.zeros = layout.zeros ? packed + layout.zeros : nullptr;
  w.step = step;
  w.row_tiles = static_cast<int>(layout.row_tiles);
  w.k_tiles = static_cast<int>(layout.k_tiles);
  w.numbers = static_cast<int>(layout.numbers);
  w.scale_bytes = layout.scale_bytes;
  w.scale_type = scale_type;
  w.second_row = kTileRows;
  return w;
}

// Producer warps of a block: of x, of codes, of scales and zero points. Each announces its bytes of a stage.
constexpr int kMixedProducerWarps = 3;

// Tiles of kStrips times 64 rows by up to kMaxColumns rows of x. Each strip of 64 rows has kKParts consumer warpgroups,
// which share a stage's k: kTiles tiles of 64 each. kGroup: inputs that share a scale; 128 also serves whole rows,
// whose one scale every 128 take. kReserved: bytes of shared memory that the kernel needs beside the stages.
template <class T_, Code kCode_, int kGroup_, int kMaxColumns_, int kStrips_, int kKParts_, int kTiles_, int kReserved>
struct MixedPipeline {
  using T = T_;
  static constexpr Code kCode = kCode_;
  static constexpr int kGroup = kGroup_, kMaxColumns = kMaxColumns_;
  static constexpr int kStrips = kStrips_, kKParts = kKParts_, kTiles = kTiles_;

  // Threads: the producers' warpgroup, then the consumers'. Registers of a thread move from the former to the latter;
  // there are those that the block is launched with.
  static constexpr int kGroups = kStrips * kKParts, kConsumers = kGroups * sm90::kWarpgroup;
  static constexpr int kConsumerWarps = kConsumers / 32, kThreads = kConsumers + sm90::kWarpgroup;
  static constexpr int kProducerRegisters = kGroups == 2 ? 40 : 32, kConsumerRegisters = kGroups == 2 ? 232 : 112;
  static constexpr int kLaunchRegisters = sm90::kSmRegisters / kThreads / 8 * 8;
  static_assert(sm90::kWarpgroup * kProducerRegisters + kConsumers * kConsumerRegisters <= kThreads * kLaunchRegisters);

  static constexpr int kChunkTiles = kKParts * kTiles, kChunk = kChunkTiles * kTileK;  // of k a stage
  static constexpr int kGroupsOfTile = kGroup < kTileK ? kTileK / kGroup : 1;
  // A scale as it is stored, or a zero point, is of so much k; groups that share one.
  static constexpr int kNumberK = kCode == Code::e2m1 ? kTileK : kGroup, kGroupsOfNumber = kNumberK / kGroup;
  static constexpr int kNumbersOfChunk = kChunk > kNumberK ? kChunk / kNumberK : 1;
  static constexpr int kStepsOfGroup = kTileK / kStepK / kGroupsOfTile;  // within a tile

  // A stage: x in parts of 128 bytes a row, then of each strip the codes, the scales and the zero points.
  static constexpr int kPartBytes = kMaxColumns * sm90::kSwizzleBytes;
  static constexpr int kCodeBytes = kChunkTiles * tile_bytes(kCode);
  static constexpr int kScaleBytes = kNumbersOfChunk * kTileRows * (kCode == Code::e2m1 ? 2 : 4);
  static constexpr int kZeroBytes = kCode == Code::u4 ? kNumbersOfChunk * kTileRows : 0;
  static constexpr int kCodesAt = kChunkTiles * kPartBytes;
  static constexpr int kScalesAt = kCodesAt + kStrips * kCodeBytes;
  static constexpr int kZerosAt = kScalesAt + kStrips * kScaleBytes;
  static constexpr int kStageBytes = (kZerosAt + kStrips * kZeroBytes + 1023) / 1024 * 1024;
  static constexpr int kAlignment = 1024, kBarrierBytes = 256;
  static constexpr int kFit = (sm90::kMaxSharedBytes - kAlignment - kBarrierBytes - kReserved) / kStageBytes;
  static constexpr int kStages = kFit < 12 ? kFit : 12;

  static_assert(kGroup == 32 || kGroup == 64 || kGroup == 128, "a chunk has whole groups, or is within one");
  static_assert(kCode != Code::e2m1 || kGroup == 32, "MXFP4 has groups of 32");
  static_assert(kTileRows == sm90::kWgmmaRows && kTileK == 64, "a packed tile is one operand, a part of x its k");
  static_assert(kMaxColumns % 64 == 0 && kMaxColumns <= sm90::kMaxWgmmaColumns);
  static_assert(kStrips % 2 == 0, "gates have half of the strips");
  static_assert(kTiles == 1 || (kTiles == 2 && kKParts == 1), "operands are two tiles in turns");
  static_assert(kPartBytes % sm90::kSwizzleAtom == 0, "swizzled operands");
  static_assert(2 * kStages * 8 + 16 <= kBarrierBytes, "a full and an empty barrier a stage, two of the sums");
  static_assert(kStages >= 3, "two stages are on their way while one is multiplied");
};

}  // namespace radix::linear
