// out[m, n] = x[m, k] * weight[n, k]^T for more tokens than mixed_mma takes, and a packed weight (layout.cuh), on
// wgmma.
//
// clang-format off
//   cluster    row_blocks x k_shares blocks. Neighbours along the rows have the same tokens: each loads a part of x and
//              multicasts it to all. Blocks that share k have the same tile, each a part of k
//   block      one a multiprocessor, persistent: tiles of kStrips x 64 weight rows (of gate halves: half of them ups) by
//              up to kMaxColumns tokens; those of the same weight rows follow each other
//   producers  three warps (mixed_wgmma_producer.cuh): TMA of x; bulk copies of codes; of scales and zero points. A ring
//              of stages that runs on from tile to tile
//   consumers  kStrips x kKParts warpgroups (mixed_wgmma_mainloop.cuh): 64 rows each, and every kKParts-th 64 of k
//   epilogue   sums of 64 tokens at a time through shared memory, where those of the shares of k are added in the order
//              of the shares (mixed_wgmma_epilogue.cuh)
// clang-format on
//
// Shared memory (kSharedBytes and static arrays):
//
//   | ring of stages | kStages x kStageBytes | x: kChunkTiles parts of kMaxColumns x 128 bytes (64 of k) |
//   |                |                       | codes: of each strip kChunkTiles tiles of 64 x 64         |
//   |                |                       | scales, zero points: of each strip, groups x 64 rows      |
//   | sums           | Sums::kBytes          | of 64 tokens and of each part of k                        |
//   | full, empty    | kStages each          | barriers (static)                                         |
//   | there, read    | 1 each                | barriers of the sums (static)                             |
#pragma once

#include "sm90/common/setmaxnreg.cuh"
#include "sm90/linear/mixed_wgmma_epilogue.cuh"

namespace radix::linear {

template <class T, Code kCode, int kGroup, int kMaxColumns, int kStrips, int kKParts>
struct MixedWgmmaTile : MixedPipeline<T, kCode, kGroup, kMaxColumns, kStrips, kKParts, kStrips == 4 ? 2 : 1,
                                      MixedSums<kStrips, kKParts>::kBytes> {
  using Sums = MixedSums<kStrips, kKParts>;
  static constexpr int kBox = 0;
  static constexpr int kSharedBytes =
      MixedWgmmaTile::kStages * MixedWgmmaTile::kStageBytes + Sums::kBytes + MixedWgmmaTile::kAlignment;
};

// Where tile `tile` of a cluster is for block `neighbour` of those along the rows. Past the last one along the rows:
// the last rows again, which are not stored.
template <class Tile>
__device__ inline MixedPlace place_of(const MixedWgmmaParams& p, int tile, int neighbour) {
  const int rows = p.epilogue.gate == gemm::Gate::halves ? Tile::Sums::kRows / 2 : Tile::Sums::kRows;
  const int token = tile % p.token_tiles * p.tokens;
  return {0, ((tile / p.token_tiles << p.row_bits) + neighbour) * rows, token, min(p.tokens, p.m - token)};
}

template <class Tile>
__device__ inline MixedX x_of(const MixedWgmmaParams& p, const MixedBlock& block) {
  return {p.row_blocks(), block.neighbour, block.share << p.row_bits};
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    mixed_wgmma_kernel(const __grid_constant__ sm90::TensorMap x_map, const __grid_constant__ MixedWgmmaParams p) {
  using namespace sm90;
  extern __shared__ char unaligned[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages], there, read;
  static_assert(shared_fits(Tile::kSharedBytes + sizeof(full) + sizeof(empty) + sizeof(there) + sizeof(read)));
  using Epilogue = MixedWgmmaEpilogue<Tile>;
  // The same in all blocks of a cluster, whose copies and reads go to the same place.
  char* stages = unaligned + (-shared_address(unaligned) & (Tile::kAlignment - 1));
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&x_map);
    Epilogue::init(p, &there, &read);
    init_mixed_barriers<Tile>(full, empty, p.row_blocks());
  }
  p.blocks() > 1 ? cluster_sync() : __syncthreads();

  if (threadIdx.x < 128) {
    setmaxnreg_dec<Tile::kProducerRegisters>();
    const MixedBlock block(p);
    MixedProducer<Tile> producer(p.weight, x_of<Tile>(p, block), block.chunks, stages, full, empty);
    producer.run(block.first_tile, p.tiles, block.tile_step, &x_map,
                 [&](int tile) { return place_of<Tile>(p, tile, block.neighbour); });
  } else {
    setmaxnreg_inc<Tile::kConsumerRegisters>();
    pdl_wait();
    const MixedBlock block(p);
    MixedMainloop<Tile> products(p.weight, x_of<Tile>(p, block), block.chunks, stages, full, empty);
    Epilogue epilogue(p, stages + Tile::kStages * Tile::kStageBytes, &there, &read, block);
    for (int tile = block.first_tile; tile < p.tiles; tile += block.tile_step) {
      constexpr int kColumns = Tile::kMaxColumns;
      float sum[kColumns / 2] = {};
      products.template multiply<kColumns>(sum);
      epilogue.template store<kColumns>(place_of<Tile>(p, tile, block.neighbour), sum);
    }
    // A block's shared memory stays until its neighbours have read it, copied into it (the producer's end) and arrived
    // at its barriers. A barrier of the cluster would also wait for the results to reach memory.
    epilogue.drain();
  }
#ifdef RADIX_EVERY_LANE_ARRIVES  // racecheck knows of a neighbour's end by barriers of the cluster alone
  __syncwarp();
  if (p.blocks() > 1) cluster_sync();
#endif
}

}  // namespace radix::linear
