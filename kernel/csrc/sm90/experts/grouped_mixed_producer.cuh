// The copies of the experts' products over weights of 4 bits.
#pragma once

#include "sm90/common/tma.cuh"
#include "sm90/experts/grouped_mixed_tile.cuh"

namespace radix::experts {

template <class Tile>
class GroupedMixedProducer {
 public:
  using Ring = sm90::Ring<Tile::kStages>;

  __device__ GroupedMixedProducer(const GroupedMixedParams& p, char* stages, uint64_t* full)
      : p_(p), w_(p.weights), stages_(stages), full_(full) {}

  __device__ void begin(const TilePlace& at) {
    boxes_ = (at.count + Tile::kBox - 1) / Tile::kBox;
    begin_ = at.begin;
    expert_ = at.expert * w_.expert_bytes;
    row_ = at.row_tile * Tile::kFeatures;
  }

  // Announces all of a stage's bytes.
  __device__ void load_weights(const Ring& ring, int chunk) const {
    uint64_t* barrier = &full_[ring.index];
    char* stage = stages_ + ring.index * Tile::kStageBytes;
    const int tiles = min(Tile::kTilesOfChunk, w_.k_tiles - chunk * Tile::kTilesOfChunk);
    const int groups = min(Tile::kGroupsOfChunk, w_.groups - chunk * Tile::kGroupsOfChunk);
    const int row_bytes = w_.scale_bytes + (w_.zeros ? 1 : 0);
    sm90::barrier_arrive_expect(barrier,
                                2 * (tiles * linear::tile_bytes(Tile::kCode) + groups * linear::kTileRows * row_bytes) +
                                    Tile::kTilesOfChunk * boxes_ * kBoxBytes);
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
      const int row = row_ + i * p_.second_row;
      const int64_t group = chunk * Tile::kGroupsOfChunk;
      load_rows(stage + Tile::kCodesAt + i * Tile::kCodeBytes, w_.codes, row, w_.k_tiles, chunk * Tile::kTilesOfChunk,
                tiles, linear::tile_bytes(Tile::kCode), barrier);
      load_rows(stage + Tile::kScalesAt + i * Tile::kScaleBytes, w_.scales, row, w_.groups, group, groups,
                linear::kTileRows * w_.scale_bytes, barrier);
      if (w_.zeros)
        load_rows(stage + Tile::kZerosAt + i * Tile::kZeroBytes, w_.zeros, row, w_.groups, group, groups,
                  linear::kTileRows, barrier);
    }
  }

  __device__ void load_pairs(const Ring& ring, int chunk, const sm90::TensorMap* map) const {
    char* x = stages_ + ring.index * Tile::kStageBytes;
#pragma unroll
    for (int part = 0; part < Tile::kTilesOfChunk; part++)
      for (int box = 0; box < boxes_; box++)
        sm90::tma_load_2d(x + part * Tile::kPartBytes + box * kBoxBytes, map, &full_[ring.index],
                          chunk * Tile::kChunk + part * linear::kTileK, begin_ + box * Tile::kBox);
  }

 private:
  static constexpr int kBoxBytes = Tile::kBox * 128;

  // `count` blocks of 64 rows from `row` on, `bytes` each, that lie in [rows / 64][along][64 rows]. Where the row does
  // not begin a tile (a multiple of 16 it is), of the end of one and the beginning of the next; past the last tile it
  // comes again, whose results nobody stores.
  __device__ void load_rows(char* to, const char* from, int row, int along, int first, int count, int bytes,
                            uint64_t* barrier) const {
    const int tile = min(row / linear::kTileRows, w_.row_tiles - 1), next = min(tile + 1, w_.row_tiles - 1);
    const int skip = row % linear::kTileRows * bytes / linear::kTileRows;
    from += expert_ + first * int64_t{bytes};
    const char* begin = from + int64_t{tile} * along * bytes;
    if (skip == 0) return sm90::bulk_load(to, begin, count * bytes, barrier);
    const char* rest = from + int64_t{next} * along * bytes;
#pragma unroll 1
    for (int i = 0; i < count; i++, to += bytes, begin += bytes, rest += bytes) {
      sm90::bulk_load(to, begin + skip, bytes - skip, barrier);
      sm90::bulk_load(to + bytes - skip, rest, skip, barrier);
    }
  }

  const GroupedMixedParams& p_;
  const MixedWeights& w_;
  char* stages_;
  uint64_t* full_;
  int boxes_, begin_, row_;
  int64_t expert_;
};

}  // namespace radix::experts
