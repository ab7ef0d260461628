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

// Chunks of k that a block multiplies.
struct MixedChunks {
  int first, count;
};

// The blocks of a cluster that have the same rows of x, from rank `first` on: each loads as many of them for all, this
// one as number `index`.
struct MixedX {
  int blocks, index, first;
};

// Pipeline::kBox: rows of x a copy, as many copies as the tile's rows need; or 0: one copy of all kMaxColumns, where
// blocks load x for each other of this one's share of them.
template <class Pipeline>
class MixedProducer {
 public:
  using Ring = sm90::Ring<Pipeline::kStages>;

  __device__ MixedProducer(const MixedWeights& w, const MixedX& x, MixedChunks chunks, char* stages, uint64_t* full,
                           uint64_t* empty)
      : w_(w),
        x_(x),
        chunks_(chunks),
        memory_(stages),
        barriers_(full),
        stages_(sm90::shared_address(stages)),
        full_(sm90::shared_address(full)),
        empty_(sm90::shared_address(empty)),
        lane_(threadIdx.x % 32) {}

  // Tiles first, first + step, ..., which `place` finds. Weights are asked for before the kernel ahead, which may write
  // x, has ended. The first kMixedProducerWarps warps.
  template <class Place>
  __device__ void run(int first, int tiles, int step, const sm90::TensorMap* map, const Place& place) {
    const auto of_tiles = [&](const auto& load) {
      Ring ring;
#pragma unroll 1
      for (int tile = first; tile < tiles; tile += step) load(ring, place(tile));
      return ring;
    };
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      sm90::pdl_wait();
      sm90::pdl_trigger();
      const Ring end = of_tiles([&](Ring& ring, const MixedPlace& at) { load_x(ring, at, map); });
      if (x_.blocks > 1) drain(end);
    } else if (warp == 1) {
      of_tiles([&](Ring& ring, const MixedPlace& at) { load_codes(ring, at); });
    } else if (warp == 2) {
      of_tiles([&](Ring& ring, const MixedPlace& at) { load_numbers(ring, at); });
    }
  }

 private:
  // What a lane copies of each block of 64 rows of a strip. Where the strip does not begin a block, one lane copies the
  // end of a block and another the beginning of the next.
  struct Copies {
    const char* from;  // in the first block of k
    int to, bytes;     // from the beginning of a stage; bytes of a block, or 0
  };

  // Blocks of `bytes` bytes lie in [rows / 64][along][64 rows]. Past the last one along the rows that one comes again,
  // whose results nobody stores. lane: strips, then strips again for what is in the next block.
  __device__ Copies copies_of(const char* from, const MixedPlace& at, int lane, int along, int bytes) const {
    constexpr int kHalf = Pipeline::kStrips / 2;
    const int strip = lane % Pipeline::kStrips, next = lane / Pipeline::kStrips;
    const int row = at.row + strip / kHalf * w_.second_row + strip % kHalf * kTileRows;
    const int skip = row % kTileRows * bytes / kTileRows, tile = min(row / kTileRows + next, w_.row_tiles - 1);
    from += at.weight * w_.step + int64_t{tile} * along * bytes;
    if (next) return {from, bytes - skip, next > 1 ? 0 : skip};
    return {from + skip, 0, bytes - skip};
  }
  // Of `count` blocks of `bytes` bytes, the first of which begins at `from`.
  __device__ void load(const Ring& ring, const Copies& c, const char* from, int count, int bytes) const {
    const uint32_t barrier = full_ + ring.index * 8;
    uint32_t to = stages_ + ring.index * Pipeline::kStageBytes + c.to;
    if (c.bytes == bytes) return sm90::bulk_load_at(to, from, count * bytes, barrier);
    if (c.bytes == 0) return;
#pragma unroll 1
    for (int i = 0; i < count; i++, from += bytes, to += bytes) sm90::bulk_load_at(to, from, c.bytes, barrier);
  }

  // Waits until all stages have been read, and so no other block's copy or arrival is on its way here: the block may
  // end. The lane that loads x.
  __device__ void drain(Ring ring) const {
    if (lane_ != 0) return;
#pragma unroll 1
    for (int i = 0; i < Pipeline::kStages; i++, ring.next())
      sm90::barrier_wait_at(empty_ + ring.index * 8, ring.parity ^ 1);
  }

  // Waits for a stage and announces what this warp copies into it.
  __device__ void open(const Ring& ring, int bytes) const {
    sm90::barrier_wait_at(empty_ + ring.index * 8, ring.parity ^ 1);
    if (lane_ == 0) sm90::barrier_arrive_expect_at(full_ + ring.index * 8, bytes);
  }

  __device__ void load_x(Ring& ring, const MixedPlace& at, const sm90::TensorMap* map) const {
    if (lane_ != 0) return;
    constexpr int kParts = Pipeline::kChunkTiles;
    constexpr int kBox = Pipeline::kBox;
    const int boxes = kBox ? (at.x_count + kBox - 1) / kBox : 0;
    const int rows = kBox ? boxes * kBox : Pipeline::kMaxColumns;
    const int first = kBox ? 0 : Pipeline::kMaxColumns / x_.blocks * x_.index;
    const uint16_t mask = static_cast<uint16_t>(((1 << x_.blocks) - 1) << x_.first);
#pragma unroll 1
    for (int i = 0; i < chunks_.count; i++, ring.next()) {
      open(ring, kParts * rows * sm90::kSwizzleBytes);
      char* stage = memory_ + ring.index * Pipeline::kStageBytes;
      uint64_t* barrier = barriers_ + ring.index;
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        const int k = ((chunks_.first + i) * kParts + part) * kTileK;
        char* to = stage + part * Pipeline::kPartBytes + first * sm90::kSwizzleBytes;
        if constexpr (kBox > 0) {
#pragma unroll 1
          for (int box = 0; box < boxes; box++)
            sm90::tma_load_2d(to + box * kBox * sm90::kSwizzleBytes, map, barrier, k, at.x_row + box * kBox);
        } else if (x_.blocks > 1) {
          sm90::tma_multicast_2d(to, map, barrier, mask, k, at.x_row + first);
        } else {
          sm90::tma_load_2d(to, map, barrier, k, at.x_row);
        }
      }
    }
  }

  __device__ void load_codes(Ring& ring, const MixedPlace& at) const {
    constexpr int kTile = tile_bytes(Pipeline::kCode), kTiles = Pipeline::kChunkTiles;
    Copies copies = copies_of(w_.codes, at, lane_, w_.k_tiles, kTile);
    copies.from += int64_t{chunks_.first} * kTiles * kTile;
    copies.to += Pipeline::kCodesAt + lane_ % Pipeline::kStrips * Pipeline::kCodeBytes;
#pragma unroll 1
    for (int left = w_.k_tiles - chunks_.first * kTiles, i = chunks_.count; i > 0; i--, left -= kTiles, ring.next()) {
      const int tiles = min(kTiles, left);
      open(ring, Pipeline::kStrips * tiles * kTile);
      load(ring, copies, copies.from, tiles, kTile);
      copies.from += kTiles * kTile;
    }
  }

  // Scales, by the warp's first half, and zero points.
  __device__ void load_numbers(Ring& ring, const MixedPlace& at) const {
    constexpr int kStrips = Pipeline::kStrips;
    const bool is_zeros = lane_ >= 16;
    const int bytes = kTileRows * (is_zeros ? 1 : w_.scale_bytes), row_bytes = w_.scale_bytes + (w_.zeros ? 1 : 0);
    Copies copies = copies_of(is_zeros ? w_.zeros : w_.scales, at, lane_ % 16, w_.numbers, bytes);
    copies.to += is_zeros ? Pipeline::kZerosAt + lane_ % kStrips * Pipeline::kZeroBytes
                          : Pipeline::kScalesAt + lane_ % kStrips * Pipeline::kScaleBytes;
    if (is_zeros && !w_.zeros) copies.bytes = 0;
#pragma unroll 1
    for (int i = 0; i < chunks_.count; i++, ring.next()) {
      const int number = min((chunks_.first + i) * Pipeline::kChunk / Pipeline::kNumberK, w_.numbers - 1);
      const int numbers = min(Pipeline::kNumbersOfChunk, w_.numbers - number);
      open(ring, kStrips * numbers * kTileRows * row_bytes);
      load(ring, copies, copies.from + int64_t{number} * bytes, numbers, bytes);
    }
  }

  const MixedWeights& w_;
  const MixedX x_;
  const MixedChunks chunks_;
  char* memory_;
  uint64_t* barriers_;
  const uint32_t stages_, full_, empty_;  // their addresses
  const int lane_;
};

// The barriers of the stages, by one thread. blocks: that receive the same rows of x.
template <class Pipeline>
__device__ inline void init_mixed_barriers(uint64_t* full, uint64_t* empty, int blocks) {
  for (int i = 0; i < Pipeline::kStages; i++) {
    sm90::barrier_init(&full[i], kMixedProducerWarps);
    sm90::barrier_init(&empty[i], sm90::kWarpArrivals * Pipeline::kConsumerWarps * blocks);
  }
  sm90::barrier_init_fence();
}

}  // namespace radix::linear
