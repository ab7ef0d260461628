// The copies of a product of packed weights on wgmma.
#pragma once

#include "sm90/common/pdl.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/linear/mixed_wgmma_pipeline.cuh"

namespace radix::linear {

// Where a tile is: of which weight, its first row there, and which rows of x.
struct MixedPlace {
  int weight, row, x_row, x_count;
};

template <class Pipeline>
class MixedProducer {
 public:
  using Ring = sm90::Ring<Pipeline::kStages>;

  __device__ MixedProducer(const MixedWeights& w, char* stages, uint64_t* full, uint64_t* empty)
      : w_(w), stages_(stages), full_(full), empty_(empty) {}

  // Tiles first, first + step, ..., which `place` finds. The first weights are asked for before the kernel ahead, which
  // may write x, has ended. One thread.
  template <class Place>
  __device__ void run(int first, int tiles, int step, const sm90::TensorMap* x, const Place& place) {
    int ahead = 0;
    if (first < tiles) {
      begin(place(first));
      for (Ring ring; ahead < min(Pipeline::kStages, w_.chunks); ahead++, ring.next()) load_weights(ring, ahead);
    }
    sm90::pdl_wait();
    sm90::pdl_trigger();
    Ring ring;
    for (int tile = first; tile < tiles; tile += step) {
      begin(place(tile));
      for (int chunk = 0; chunk < w_.chunks; chunk++, ring.next()) {
        if (ahead > 0) {
          ahead--;
        } else {
          sm90::barrier_wait(&empty_[ring.index], ring.parity ^ 1);
          load_weights(ring, chunk);
        }
        load_x(ring, chunk, x);
      }
    }
  }

 private:
  __device__ void begin(const MixedPlace& at) {
    boxes_ = (at.x_count + Pipeline::kBox - 1) / Pipeline::kBox;
    x_row_ = at.x_row;
    weight_ = at.weight * w_.step;
    row_ = at.row;
  }

  // Announces all of a stage's bytes.
  __device__ void load_weights(const Ring& ring, int chunk) const {
    constexpr int kTile = tile_bytes(Pipeline::kCode), kTiles = Pipeline::kTilesOfChunk;
    uint64_t* barrier = &full_[ring.index];
    char* stage = stages_ + ring.index * Pipeline::kStageBytes;
    const int tiles = min(kTiles, w_.k_tiles - chunk * kTiles);
    const int group = min(chunk * Pipeline::kGroupsOfChunk, w_.groups - 1);
    const int groups = min(Pipeline::kGroupsOfChunk, w_.groups - group);
    const int row_bytes = w_.scale_bytes + (w_.zeros ? 1 : 0);
    sm90::barrier_arrive_expect(
        barrier, 2 * (tiles * kTile + groups * kTileRows * row_bytes) + kTiles * boxes_ * Pipeline::kBoxBytes);
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
      const int row = row_ + i * w_.second_row;
      load_rows(stage + Pipeline::kCodesAt + i * Pipeline::kCodeBytes, w_.codes, row,
                {w_.k_tiles, chunk * kTiles, tiles}, kTile, barrier);
      load_rows(stage + Pipeline::kScalesAt + i * Pipeline::kScaleBytes, w_.scales, row, {w_.groups, group, groups},
                kTileRows * w_.scale_bytes, barrier);
      if (w_.zeros)
        load_rows(stage + Pipeline::kZerosAt + i * Pipeline::kZeroBytes, w_.zeros, row, {w_.groups, group, groups},
                  kTileRows, barrier);
    }
  }

  __device__ void load_x(const Ring& ring, int chunk, const sm90::TensorMap* map) const {
    char* x = stages_ + ring.index * Pipeline::kStageBytes;
#pragma unroll
    for (int part = 0; part < Pipeline::kTilesOfChunk; part++)
      for (int box = 0; box < boxes_; box++)
        sm90::tma_load_2d(x + part * Pipeline::kPartBytes + box * Pipeline::kBoxBytes, map, &full_[ring.index],
                          chunk * Pipeline::kChunk + part * kTileK, x_row_ + box * Pipeline::kBox);
  }

  // Blocks of 64 rows along k: how many there are, and of these the first and how many are meant.
  struct Blocks {
    int along, first, count;
  };

  // Blocks of 64 rows from `row` on, `bytes` each, that lie in [rows / 64][along][64 rows]. Where the row does not
  // begin a tile (a strip it does), of the end of one and the beginning of the next; past the last tile that one comes
  // again, whose results nobody stores.
  __device__ void load_rows(char* to, const char* from, int row, const Blocks& blocks, int bytes,
                            uint64_t* barrier) const {
    const int tile = min(row / kTileRows, w_.row_tiles - 1), next = min(tile + 1, w_.row_tiles - 1);
    const int skip = row % kTileRows * bytes / kTileRows;
    from += weight_ + blocks.first * int64_t{bytes};
    const char* begin = from + int64_t{tile} * blocks.along * bytes;
    if (skip == 0) return sm90::bulk_load(to, begin, blocks.count * bytes, barrier);
    const char* rest = from + int64_t{next} * blocks.along * bytes;
#pragma unroll 1
    for (int i = 0; i < blocks.count; i++, to += bytes, begin += bytes, rest += bytes) {
      sm90::bulk_load(to, begin + skip, bytes - skip, barrier);
      sm90::bulk_load(to + bytes - skip, rest, skip, barrier);
    }
  }

  const MixedWeights& w_;
  char* stages_;
  uint64_t *full_, *empty_;
  int boxes_, x_row_, row_;
  int64_t weight_;
};

}  // namespace radix::linear
