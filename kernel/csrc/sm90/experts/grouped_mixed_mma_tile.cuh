// What a launch of grouped_mixed_mma passes, and the way of its blocks through the tiles.
#pragma once

#include "sm90/experts/grouped_mixed_mma_plan.cuh"
#include "sm90/linear/mixed_mma_tile.cuh"

namespace radix::experts {

// Rows of the weight are counted in units: a strip of 16, or (gated) a strip of gates and its strip of ups.
struct GroupedMixedMmaParams : linear::MixedForm {  // of the first expert
  Routing routing;
  uint32_t expert_step;  // bytes from one expert's weight to the next
  const char* x;
  int64_t x_step;  // bytes
  int x_bytes;     // of a row of x, a multiple of 16
  int x_pairs;     // pairs in a row that have the same row of x
  int units, most_units;
  int up_strips;  // where gated from a strip of gates to its ups, else 0
  bool first;     // the kernel ahead may have written the ids
  MixedBias bias;
  MixedActivation activation;  // where gated
  char* out;                   // a row of `columns` for each pair
  int columns, rows;           // of the result; of an expert's weight
};

constexpr int kMixedMmaStages = 8;  // of x, at most

// Pairs a tile, warps that have rows and warps that share k.
template <linear::Code kCode, int kGroup, int kTokens, int kRowWarps, int kKWarps>
struct GroupedMixedMmaTile : linear::MixedTile<kCode, kGroup, kTokens, kRowWarps, kKWarps, 1,
                                               linear::round_tiles<kCode, kGroup, kTokens>(), kMixedMmaStages> {
  using Plan = MixedMmaPlan<kTokens, GroupedMixedMmaTile::kThreads>;
  static constexpr int kSharedBytes =
      GroupedMixedMmaTile::MixedTile::kSharedBytes + GroupedMixedMmaTile::kPartialBytes;  // two sets of partials
  static constexpr int kProducers = GroupedMixedMmaTile::kThreads - GroupedMixedMmaTile::kConsumers;
  static constexpr int kPieces = linear::kTileK * 2 / 16;              // of 16 bytes, of a row and a tile of k
  static constexpr int kTilesAtOnce = kProducers / kPieces / kTokens;  // tiles of k that all producers copy

  static_assert(kProducers == sm90::kWarpgroup && kTilesAtOnce * kPieces * kTokens == kProducers,
                "each producer copies pieces of one row");
  static_assert(GroupedMixedMmaTile::kStageTiles % kTilesAtOnce == 0);
  static_assert(sm90::shared_fits(GroupedMixedMmaTile::kSharedBytes + 2 * kMixedMmaStages * 8 + int{sizeof(Plan)}),
                "the plan and the barriers are static");
};

template <class Tile>
class GroupedMixedMmaWalk {
 public:
  static constexpr bool kStacked = true;

  __device__ GroupedMixedMmaWalk(const GroupedMixedMmaParams& p, const typename Tile::Plan& plan)
      : p_(p), plan_(plan) {}
  __device__ const linear::MixedForm& form() const { return p_; }
  __device__ static constexpr bool waits() { return false; }
  __device__ int tiles() const { return plan_.tiles; }
  __device__ int weight(int tile) const { return plan_.expert[block(tile)]; }
  __device__ int64_t offset(int expert) const {
    return static_cast<int64_t>(uint64_t{static_cast<uint32_t>(expert)} * p_.expert_step);
  }
  __device__ int strip_of(int tile, int slot) const {
    return Tile::strip_of(first_unit(tile), units(tile), p_.up_strips, slot);
  }

  // The block of pairs of a tile, its units of rows, its pairs.
  __device__ int block(int tile) const { return tile / plan_.row_tiles; }
  __device__ int first_unit(int tile) const { return tile % plan_.row_tiles * plan_.tile_units; }
  __device__ int units(int tile) const { return min(plan_.tile_units, p_.units - first_unit(tile)); }
  __device__ int pairs(int tile) const { return plan_.count[block(tile)]; }
  __device__ int pair(int tile, int i) const { return plan_.pair[plan_.begin[block(tile)] + i]; }

 private:
  const GroupedMixedMmaParams& p_;
  const typename Tile::Plan& plan_;
};

}  // namespace radix::experts
