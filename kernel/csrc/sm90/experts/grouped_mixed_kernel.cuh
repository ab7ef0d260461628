// Fused experts over packed weights, on wgmma: result[place, f] = w[e][f, :] @ x[place, :], the places of expert e
// being begins[e] .. ends[e] - 1.
//
//   block: persistent, one a multiprocessor; tiles of 2 x 64 weight rows by up to kMaxColumns pairs of one expert,
//   whose number chooses the instruction's columns; those of the same weight rows follow each other, so that the
//   weights come from memory once. producers (three warps, linear/mixed_wgmma_producer.cuh): TMA of the pairs' rows;
//   bulk copies of the codes, and of the scales and zero points, of 2 x 64 rows and 128 of k, as they are packed, into
//   a ring of stages that runs on from tile to tile. consumers (two warpgroups, linear/mixed_wgmma_mainloop.cuh): 64
//   rows each. epilogue: bias; where gated the first warpgroup has 64 gate rows and the second their up rows, of which
//   they exchange half: silu(gate) * up or the clamped SwiGLU; rows of the result in pieces of 16 bytes.
//
// Shared memory (kSharedBytes and static arrays):
//
//   | ring of stages | kStages x kStageBytes | x: 2 parts of kMaxColumns x 128 bytes (64 of k, swizzled) |
//   |                |                       | codes: of each warpgroup 2 tiles of 64 x 64               |
//   |                |                       | scales, zero points: of each warpgroup, groups x 64 rows  |
//   | staging        | Staging::kBytes       | what gate and up exchange, then 64 pairs of a warpgroup   |
//   | full, empty    | kStages each          | barriers (static)                                         |
//   | schedule       | 12 KiB                | of each expert: first and last pair, first tile (static)  |
#pragma once

#include "sm90/common/setmaxnreg.cuh"
#include "sm90/experts/grouped_mixed_epilogue.cuh"
#include "sm90/linear/mixed_wgmma_mainloop.cuh"
#include "sm90/linear/mixed_wgmma_producer.cuh"

namespace radix::experts {

// A block has its tiles alone, and all of k.
__device__ inline linear::MixedX alone() {
  return {1, 0, 0};
}
template <class Tile>
__device__ inline linear::MixedChunks chunks_of(const GroupedMixedParams& p) {
  return {0, (p.weights.k_tiles + Tile::kChunkTiles - 1) / Tile::kChunkTiles};
}

template <class Tile>
class GroupedMixedConsumer {
 public:
  __device__ GroupedMixedConsumer(const GroupedMixedParams& p, char* stages, uint64_t* full, uint64_t* empty)
      : products_(p.weights, alone(), chunks_of<Tile>(p), stages, full, empty),
        epilogue_(p, stages + Tile::kStages * Tile::kStageBytes, threadIdx.x / 128 - 1) {}

  __device__ void run(const TilePlace& at) {
    const int columns = Tile::columns(at.count);
    if constexpr (Tile::kMaxColumns <= 64) {
      columns == 16 ? run<16>(at) : columns == 32 ? run<32>(at) : run<64>(at);
    } else {
      columns == 64 ? run<64>(at) : columns == 96 ? run<96>(at) : run<128>(at);
    }
  }

 private:
  template <int kColumns>
  __device__ void run(const TilePlace& at) {
    float sum[kColumns / 2] = {};
    products_.template multiply<kColumns>(sum);
    epilogue_.template store<kColumns>(at, sum);
  }

  linear::MixedMainloop<Tile> products_;
  GroupedMixedEpilogue<Tile> epilogue_;
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    grouped_mixed_kernel(const __grid_constant__ sm90::TensorMap x_map, const __grid_constant__ GroupedMixedParams p) {
  using namespace sm90;
  extern __shared__ char unaligned[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages];
  __shared__ Schedule schedule;
  static_assert(shared_fits(Tile::kSharedBytes + sizeof(full) + sizeof(empty) + sizeof(schedule)));
  char* stages = unaligned + (-shared_address(unaligned) & (Tile::kAlignment - 1));
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&x_map);
    linear::init_mixed_barriers<Tile>(full, empty, 1);
  }
  if (!p.placed) pdl_wait();
  if (threadIdx.x < 32) schedule.find(p, Tile::kMaxColumns);
  __syncthreads();
  const int tiles = schedule.first[p.named] * p.row_tiles;
  const auto place = [&](int tile) { return TilePlace::find<Tile>(schedule, p, tile, 0); };

  if (threadIdx.x < 128) {
    setmaxnreg_dec<Tile::kProducerRegisters>();
    linear::MixedProducer<Tile> producer(p.weights, alone(), chunks_of<Tile>(p), stages, full, empty);
    producer.run(blockIdx.x, tiles, gridDim.x, &x_map, [&](int tile) {
      const TilePlace at = place(tile);
      return linear::MixedPlace{at.expert, at.row_tile * Tile::kFeatures, at.begin, at.count};
    });
  } else {
    setmaxnreg_inc<Tile::kConsumerRegisters>();
    pdl_wait();
    GroupedMixedConsumer<Tile> self(p, stages, full, empty);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) self.run(place(tile));
  }
}

}  // namespace radix::experts
