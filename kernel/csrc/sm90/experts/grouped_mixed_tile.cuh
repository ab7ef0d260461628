// Tiles of the experts' products over packed weights, and what a launch passes.
#pragma once

#include "sm90/experts/grouped_swap_ab_tile.cuh"
#include "sm90/experts/mixed_problem.cuh"

namespace radix::experts {

struct GroupedMixedParams {
  const int32_t *begins, *ends;  // [named]: the places of an expert's pairs
  static constexpr int room = 0;
  const int32_t* map;  // [named], or null
  int named;
  linear::MixedWeights weights;
  int rows, row_tiles;  // of an expert's weight; tiles along them
  MixedBias bias;
  MixedActivation activation;  // where gated
  char* out;                   // where gated by place, else by pair
  const int32_t* sorted;       // where not gated: the pair of a place
  int n;                       // columns of the result
  bool placed;                 // offsets were there before the kernel ahead began
};

// The way of results to memory: first what gate and up exchange, then 64 pairs of each warpgroup.
template <bool kGated, int kMaxColumns>
struct GroupedMixedStaging {
  static constexpr int kPieces = linear::kTileRows / 8;  // of 16 bytes, of a pair and a warpgroup
  static constexpr int kStaged = 64;                     // pairs
  static constexpr int kStagingBytes = kStaged * kPieces * 16;
  static constexpr int kExchangeBytes = kGated ? 2 * (kMaxColumns / 4) * sm90::kWarpgroup * 4 : 0;
  static constexpr int kBytes = kExchangeBytes > 2 * kStagingBytes ? kExchangeBytes : 2 * kStagingBytes;
};

template <class T, linear::Code kCode, int kGroup, bool kGated_, int kMaxColumns>
struct GroupedMixedTile
    : linear::MixedPipeline<T, kCode, kGroup, kMaxColumns, 2, 1, 2,
                            GroupedMixedStaging<kGated_, kMaxColumns>::kBytes + int{sizeof(Schedule)}> {
  using Staging = GroupedMixedStaging<kGated_, kMaxColumns>;
  static constexpr bool kGated = kGated_;
  static constexpr int kCluster = 1;
  static constexpr int kFeatures = kGated ? 64 : 128;      // columns of the result
  static constexpr int kBox = kMaxColumns > 64 ? 32 : 16;  // pairs a copy
  static constexpr int kSharedBytes =
      GroupedMixedTile::kStages * GroupedMixedTile::kStageBytes + Staging::kBytes + GroupedMixedTile::kAlignment;

  // The instruction's columns, of these the fewest that hold the pairs.
  static __device__ constexpr int columns(int count) {
    if constexpr (kMaxColumns <= 64) return count <= 16 ? 16 : count <= 32 ? 32 : 64;
    return count <= 64 ? 64 : count <= 96 ? 96 : 128;
  }
};

}  // namespace radix::experts
