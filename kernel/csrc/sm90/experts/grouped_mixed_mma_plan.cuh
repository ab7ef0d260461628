// Which experts a call of few pairs names, and the tiles of a product of theirs: found by every block for itself, so
// that the order costs no launch.
#pragma once

#include <cstdint>

#include "sm90/experts/mixed_problem.cuh"

namespace radix::experts {

static_assert(kMixedMmaPairs % 32 == 0 && kMixedMmaPairs <= INT16_MAX, "pairs are found 32 at a time, kept in 16 bits");

// A block of pairs is up to kTokens pairs of one expert; tiles are the units of rows of a block of pairs, tile_units at
// a time. Blocks of the same expert follow each other.
template <int kTokens, int kThreads>
struct MixedMmaPlan {
  int tile_units, row_tiles, tiles;  // units of a tile; tiles of a block of pairs; of all
  int16_t pair[kMixedMmaPairs];      // by expert, in ascending order
  int16_t expert[kMixedMmaPairs];    // of a block of pairs, as the weights number it
  int16_t begin[kMixedMmaPairs];     // its first place in `pair`
  int16_t count[kMixedMmaPairs];     // and its pairs

  // What find() needs of memory that is free until it returns: of each pair its expert and how many pairs of its 32 it
  // follows there; of each expert its pairs in every 32, then those before them, then in all, then the first place.
  static constexpr int kCountsAt = kMixedMmaPairs * 3;
  static int scratch_bytes(const Routing& r) {
    return kCountsAt + (chunks_of(r) + 1) * row_of(r) * static_cast<int>(sizeof(uint16_t));
  }

  // Before the pairs are known. The next barrier is in find().
  __device__ void clear(const Routing& r, char* scratch) {
    uint32_t* words = reinterpret_cast<uint32_t*>(scratch + kCountsAt);
    for (int i = threadIdx.x; i < chunks_of(r) * row_of(r) / 2; i += kThreads) words[i] = 0;
  }

  // By all threads of the block. units: of the product's rows; most_units: that a tile may have.
  __device__ void find(const Routing& r, int units, int most_units, char* scratch) {
    int16_t* local = reinterpret_cast<int16_t*>(scratch);
    uint8_t* follows = reinterpret_cast<uint8_t*>(scratch + 2 * kMixedMmaPairs);
    uint16_t* counts = reinterpret_cast<uint16_t*>(scratch + kCountsAt);
    const int pairs = r.tokens * r.topk, chunks = chunks_of(r), row = row_of(r);
    uint16_t* all = counts + chunks * row;
    __syncthreads();
    for (int c = threadIdx.x / 32; c < chunks; c += kThreads / 32) {
      const int i = c * 32 + threadIdx.x % 32;
      const int mine = i < pairs ? max(r.local(r.ids[i]), -1) : -1;
      const uint32_t same = __match_any_sync(~0u, mine);
      const int earlier = __popc(same & ((1u << threadIdx.x % 32) - 1));
      local[i] = static_cast<int16_t>(mine);
      follows[i] = static_cast<uint8_t>(earlier);
      if (mine >= 0 && earlier == 0) counts[c * row + mine] = static_cast<uint16_t>(__popc(same));
    }
    __syncthreads();
    for (int e = threadIdx.x; e < r.experts; e += kThreads) {
      int before = 0;
      for (int c = 0; c < chunks; c++) {
        const int here = counts[c * row + e];
        counts[c * row + e] = static_cast<uint16_t>(before);
        before += here;
      }
      all[e] = static_cast<uint16_t>(before);
    }
    __syncthreads();
    if (threadIdx.x < 32) divide(units, most_units, list_blocks(r.experts, all));
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += kThreads) {
      const int mine = local[i];
      if (mine >= 0) pair[all[mine] + counts[i / 32 * row + mine] + follows[i]] = static_cast<int16_t>(i);
    }
    __syncthreads();
  }

 private:
  static_assert(kTokens == 8 || kTokens == 16, "pairs of a tile");
  static_assert(kThreads % 32 == 0 && kThreads >= 32);

  static __host__ __device__ int chunks_of(const Routing& r) { return (r.tokens * r.topk + 31) / 32; }
  static __host__ __device__ int row_of(const Routing& r) { return (r.experts + 1) / 2 * 2; }

  // By one warp. all [experts]: pairs of an expert, of which it makes their first place. Returns how many blocks.
  __device__ int list_blocks(int experts, uint16_t* all) {
    const int lane = threadIdx.x % 32, run = (experts + 31) / 32;
    const int from = min(lane * run, experts), to = min(from + run, experts);
    int own = 0, own_blocks = 0;
    for (int e = from; e < to; e++) {
      own += all[e];
      own_blocks += (all[e] + kTokens - 1) / kTokens;
    }
    int place = own, block = own_blocks;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, place, step), blocks_before = __shfl_up_sync(~0u, block, step);
      if (lane < step) continue;
      place += before;
      block += blocks_before;
    }
    const int blocks = __shfl_sync(~0u, block, 31);
    place -= own;
    block -= own_blocks;
    for (int e = from; e < to; e++) {
      const int end = place + all[e];
      all[e] = static_cast<uint16_t>(place);
      for (; place < end; place += min(kTokens, end - place), block++) {
        expert[block] = static_cast<int16_t>(e);
        begin[block] = static_cast<int16_t>(place);
        count[block] = static_cast<int16_t>(min(kTokens, end - place));
      }
    }
    return blocks;
  }

  // By one warp: the size of the tiles, so that the blocks of the grid end together; a tile costs a unit beside its
  // own. Lane i weighs tiles of i + 1 units.
  __device__ void divide(int units, int most_units, int blocks) {
    const int lane = threadIdx.x % 32, each = lane + 1, grid = gridDim.x;
    const int all = blocks * ((units + each - 1) / each);
    const uint32_t cost = (all + grid - 1) / grid * (each + 1);
    const uint32_t best = __reduce_min_sync(~0u, each <= most_units ? cost * 32 + 31 - lane : ~0u);
    if (lane != 0) return;
    tile_units = 32 - static_cast<int>(best % 32);
    row_tiles = (units + tile_units - 1) / tile_units;
    tiles = blocks * row_tiles;
  }
};

}  // namespace radix::experts
