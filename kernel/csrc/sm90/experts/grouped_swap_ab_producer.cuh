// The copies of the kernel for sorted pairs.
#pragma once

#include "sm90/common/tma.cuh"
#include "sm90/experts/grouped_swap_ab_tile.cuh"

namespace radix::experts {

// What a block copies. x of the pairs is shared by the blocks of the cluster: each sends its boxes to all.
template <class Tile>
class GroupedSwapAbProducer {
 public:
  using Ring = sm90::Ring<Tile::kStages>;

  __device__ GroupedSwapAbProducer(const GroupedSwapAbParams& p, char* stages, uint64_t* full, int rank)
      : p_(p), stages_(stages), full_(full), rank_(rank) {}

  __device__ void begin(const TilePlace& at) {
    boxes_ = (at.count + Tile::kBox - 1) / Tile::kBox;
    const int each = (boxes_ + Tile::kCluster - 1) / Tile::kCluster;
    first_ = rank_ * each;
    last_ = min(boxes_, first_ + each);
    bytes_ = Tile::kWeightBytes + Tile::kParts * boxes_ * kBoxBytes + (Tile::kScaleBytes ? Tile::kScaleBox * 4 : 0);
    rows_ = at.expert * p_.expert_rows + at.row_tile * Tile::kRuns * kMapRows;
    begin_ = at.begin;
  }

  // Announces all of a stage's bytes.
  __device__ void load_weights(const Ring& ring, int run, int chunk, const sm90::TensorMap* map) const {
    uint64_t* barrier = &full_[ring.index];
    char* stage = stages_ + ring.index * Tile::kStageBytes;
    const int k = chunk * Tile::kChunk, rows = rows_ + run * kMapRows;
    sm90::barrier_arrive_expect(barrier, bytes_);
    if constexpr (Tile::kGated) {
      sm90::tma_load_4d(stage, map, barrier, k, 0, 0, rows);
    } else {
      sm90::tma_load_2d(stage, map, barrier, k, rows);
    }
  }

  __device__ void load_pairs(const Ring& ring, int chunk, const sm90::TensorMap* map,
                             const sm90::TensorMap* scale_map) const {
    uint64_t* barrier = &full_[ring.index];
    char* x = stages_ + ring.index * Tile::kStageBytes + Tile::kWeightBytes;
    if constexpr (Tile::kScaleBytes > 0)
      sm90::tma_load_2d(stages_ + Tile::kStages * Tile::kStageBytes + ring.index * Tile::kScaleBytes, scale_map,
                        barrier, begin_ & ~3, chunk);
#pragma unroll
    for (int part = 0; part < Tile::kParts; part++) {
      const int k = chunk * Tile::kChunk + part * Tile::kPartK;
      for (int box = first_; box < last_; box++) {
        char* to = x + part * Tile::kPartBytes + box * kBoxBytes;
        if constexpr (Tile::kCluster == 1) {
          sm90::tma_load_2d(to, map, barrier, k, begin_ + box * Tile::kBox);
        } else {
          sm90::tma_multicast_2d(to, map, barrier, (1 << Tile::kCluster) - 1, k, begin_ + box * Tile::kBox);
        }
      }
    }
  }

 private:
  static constexpr int kBoxBytes = Tile::kBox * 128;
  static constexpr int kMapRows = Tile::kGated ? kTileRows / 16 : kTileRows;  // the map's, of a run

  const GroupedSwapAbParams& p_;
  char* stages_;
  uint64_t* full_;
  const int rank_;
  int boxes_, first_, last_, rows_, begin_;
  uint32_t bytes_;
};

}  // namespace radix::experts
