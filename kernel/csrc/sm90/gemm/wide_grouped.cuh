// The wide kernel where each tile of tokens has a weight of its own: grouped products.
//
// What a tile's tokens are, and whose, stands in a list in device memory that a launch ahead has made (WideRows): 128
// rows of x from anywhere on, of one group. Both blocks of a cluster have the same tokens and neighbouring weight rows,
// so that groups of any size may follow each other. A row behind a tile's end is multiplied and dropped: x's next rows
// are read as operands, never their scales; results are stored for rows that exist alone. A warpgroup without rows
// leaves the tensor cores to the other.
//
// Order: bands of kWideBand tiles of tokens, in each the tokens first, so that a group's weight rows are read by blocks
// that run together.
#pragma once

#include "sm90/gemm/wide_kernel.cuh"

namespace radix::gemm {

// A tile's rows of x and of the result, row .. end - 1, at most kWideTokens; none: the tile is skipped.
struct __align__(16) WideRows {
  int row, end, group, unused;
};

struct WideGroups {
  const WideRows* tiles;
  const int* count;
};

__device__ inline WideRows load_rows(const WideRows* from) {
  const int4 v = *reinterpret_cast<const int4*>(from);
  return {v.x, v.y, v.z, v.w};
}

// The tiles of a cluster one after the other. The next one's rows are on their way while this one is multiplied.
class WideTour {
 public:
  __device__ WideTour(const WideParams& p, const WideGroups& groups, int rank)
      : tiles_(groups.tiles), rank_(rank), high_(*groups.count), wide_(p.n_tiles / kWideCluster) {
    tile_ = blockIdx.x / kWideCluster;
    if (here()) find();
  }
  __device__ bool here() const { return tile_ < high_ * wide_; }
  // The present tile; goes on to the next.
  __device__ WidePlace take() {
    const WidePlace at = {rows_.row, rows_.end, n_tile_, 0, rows_.group};
    tile_ += gridDim.x / kWideCluster;
    if (here()) find();
    return at;
  }

 private:
  __device__ void find() {
    const int band = kWideBand * wide_, first = tile_ / band * kWideBand, rows = min(kWideBand, high_ - first);
    const int at = tile_ - first * wide_;
    rows_ = load_rows(tiles_ + first + at % rows);
    n_tile_ = at / rows * kWideCluster + rank_;
  }

  const WideRows* tiles_;
  const int rank_, high_, wide_;
  int tile_, n_tile_;
  WideRows rows_;
};

template <sm90::Operand kType, class Out, class Tile, Sums kSums, Weights kWeights>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_grouped_kernel(const __grid_constant__ sm90::TensorMap x_map,
                        const __grid_constant__ sm90::TensorMap weight_map,
                        const __grid_constant__ sm90::TensorMap out_map, const __grid_constant__ WideParams p,
                        const __grid_constant__ WideGroups groups) {
  using namespace sm90;
  constexpr Share kShare = Share::tokens;
  constexpr bool kBlockScaled = kSums == Sums::blocks;
  extern __shared__ __align__(1024) char begin[];
  const WideShared<Tile> shared(begin);
  const int rank = cluster_rank();
  int chunks = p.chunks;
  asm volatile("" : "+r"(chunks));
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; i++) {
      barrier_init(&shared.full[i], kBlockScaled ? 33 : 1);
      barrier_init(&shared.empty[i], kWarpArrivals * 8 * kWideCluster);
    }
    barrier_init_fence();
  }
  cluster_sync();
  pdl_trigger();

  if (threadIdx.x < 128) {
    give_registers<40>();
    if (threadIdx.x == 0) {
      pdl_wait();
      WideProducer<kType, Tile, kShare> self(p, shared, x_map, weight_map, 0);
      int ahead = 0;
      for (WideTour tour(p, groups, rank); tour.here();) {
        const WidePlace at = tour.take();
        if (at.row < at.end) self.load(at, rank, chunks, ahead);
      }
    } else if (kBlockScaled && threadIdx.x / 32 == 1) {
      pdl_wait();
      Ring<Tile::kStages> ring;
      for (WideTour tour(p, groups, rank); tour.here();) {
        const WidePlace at = tour.take();
        if (at.row >= at.end) continue;
        WideScales<Tile, kWeights> from(p, at, 0);
        for (int chunk = 0; chunk < chunks; chunk++, ring.next()) {
          barrier_wait(&shared.empty[ring.index], ring.parity ^ 1);
          from.copy(shared.block_scales(ring.index), &shared.full[ring.index]);
        }
      }
    }
  } else {
    take_registers<232>();
    pdl_wait();
    using Consumer = WideConsumer<kType, Out, Tile, kSums, kShare, kWeights>;
    Consumer self(p, shared);
    for (WideTour tour(p, groups, rank); tour.here();) {
      const WidePlace at = tour.take();
      if (at.row >= at.end) continue;
      if (self.idle(at)) {
        self.pass(chunks);
        continue;
      }
      if constexpr (Consumer::kInTurn) self.start();
      self.multiply(at, chunks);
      self.end(out_map, at);
      self.store(out_map, at, 0);
    }
    self.finish();
  }
  __syncwarp();
  cluster_sync_relaxed();
}

}  // namespace radix::gemm
