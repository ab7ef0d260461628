// The persistent kernel where each tile of tokens has a weight of its own: grouped products, which csrc/sm90/experts
// launches. Its mainloop, epilogue and shared memory are those of wgmma_persistent_kernel.cuh.
//
// What a tile's tokens are, and whose, stands in a list in device memory that a launch ahead has made (TileRows): 128
// rows of x from anywhere on, of one group. Both blocks of a cluster have the same tokens and neighbouring weight rows,
// so that groups of any size may follow each other. A row behind a tile's end is multiplied and dropped: x's next rows
// are read as operands, never their scales; results are stored for rows that exist alone. A warpgroup without rows
// leaves the tensor cores to the other.
//
// Order: bands of kTileBand tiles of tokens, in each the tokens first, so that a group's weight rows are read by blocks
// that run together.
#pragma once

#include "sm90/gemm/wgmma_persistent_kernel.cuh"

namespace radix::gemm {

// A tile's rows of x and of the result, row .. end - 1, at most kPersistentTokens; none: the tile is skipped.
struct __align__(16) TileRows {
  int row, end, group, unused;
};

struct TileRowsList {
  const TileRows* tiles;
  const int* count;
};

__device__ inline TileRows load_rows(const TileRows* from) {
  const int4 v = *reinterpret_cast<const int4*>(from);
  return {v.x, v.y, v.z, v.w};
}

// The tiles of a cluster one after the other. The next one's rows are on their way while this one is multiplied.
class GroupedTileOrder {
 public:
  __device__ GroupedTileOrder(const PersistentParams& p, const TileRowsList& groups, int rank)
      : tiles_(groups.tiles), rank_(rank), high_(*groups.count), wide_(p.n_tiles / kPersistentCluster) {
    tile_ = blockIdx.x / kPersistentCluster;
    if (here()) find();
  }
  __device__ bool here() const { return tile_ < high_ * wide_; }
  // The present tile; goes on to the next.
  __device__ TileCoord take() {
    const TileCoord at = {rows_.row, rows_.end, n_tile_, 0, rows_.group};
    tile_ += gridDim.x / kPersistentCluster;
    if (here()) find();
    return at;
  }

 private:
  __device__ void find() {
    const int band = kTileBand * wide_, first = tile_ / band * kTileBand, rows = min(kTileBand, high_ - first);
    const int at = tile_ - first * wide_;
    rows_ = load_rows(tiles_ + first + at % rows);
    n_tile_ = at / rows * kPersistentCluster + rank_;
  }

  const TileRows* tiles_;
  const int rank_, high_, wide_;
  int tile_, n_tile_;
  TileRows rows_;
};

template <sm90::Operand kType, class Out, class Tile, Sums kSums, Weights kWeights>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    grouped_persistent_kernel(const __grid_constant__ sm90::TensorMap x_map,
                              const __grid_constant__ sm90::TensorMap weight_map,
                              const __grid_constant__ sm90::TensorMap out_map,
                              const __grid_constant__ PersistentParams p, const __grid_constant__ TileRowsList groups) {
  using namespace sm90;
  constexpr Share kShare = Share::tokens;
  constexpr bool kBlockScaled = kSums == Sums::blocks;
  static_assert(kWeights != Weights::dense, "wgmma_persistent_kernel is for one weight");
  static_assert(Tile::kHalves == 1, "a list names rows for tiles of 128 tokens");
  extern __shared__ __align__(1024) char begin[];
  const PersistentShared<Tile> shared(begin);
  const int rank = cluster_rank();
  int chunks = p.chunks;
  asm volatile("" : "+r"(chunks));
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; i++) {
      barrier_init(&shared.full[i], kBlockScaled ? 33 : 1);
      barrier_init(&shared.empty[i], kWarpArrivals * 8 * kPersistentCluster);
    }
    barrier_init_fence();
  }
  cluster_sync();
  pdl_trigger();

  if (threadIdx.x < 128) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) {
      pdl_wait();
      PersistentProducer<kType, Tile, kShare, kWeights> self(p, shared, x_map, x_map, weight_map, 0);
      int ahead = 0;
      for (GroupedTileOrder tour(p, groups, rank); tour.here();) {
        const TileCoord at = tour.take();
        if (at.row < at.end) self.load(at, rank, chunks, ahead);
      }
    } else if (kBlockScaled && threadIdx.x / 32 == 1) {
      pdl_wait();
      Ring<Tile::kStages> ring;
      for (GroupedTileOrder tour(p, groups, rank); tour.here();) {
        const TileCoord at = tour.take();
        if (at.row >= at.end) continue;
        BlockScaleLoader<Tile, kWeights> from(p, at, 0);
        for (int chunk = 0; chunk < chunks; chunk++, ring.next()) {
          barrier_wait(&shared.empty[ring.index], ring.parity ^ 1);
          from.copy(shared.block_scales(ring.index), &shared.full[ring.index]);
        }
      }
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    pdl_wait();
    using Consumer = PersistentConsumer<kType, Out, Tile, kSums, kShare, kWeights>;
    Consumer self(p, shared);
    for (GroupedTileOrder tour(p, groups, rank); tour.here();) {
      const TileCoord at = tour.take();
      if (at.row >= at.end) continue;
      if (self.idle(at)) {
        self.skip_stages(chunks);
        continue;
      }
      if constexpr (Consumer::kPingPong) self.start();
      self.mainloop(at, chunks);
      self.begin_epilogue(out_map, at);
      self.epilogue(out_map, at, 0);
    }
    self.finish();
  }
  __syncwarp();
  cluster_sync_relaxed();
}

}  // namespace radix::gemm
