// out[m, n] = x[m, k] * weight[n, k]^T for up to 32 tokens and a packed weight (layout.cuh), on mma.sync. Bound by
// bytes: the weight is read once.
//
// The weight's 16 rows of a strip are the product's rows and 8 tokens its columns.
//
// clang-format off
//   block          a tile of up to kRowWarps * kUnits strips at a time, persistent over tiles
//   consumer warp  (r, q) multiplies kUnits strips, kRound tiles of k a round: codes, scales and zero points come from
//                  memory into registers two rounds ahead and are widened there
//   producer       x by TMA, [kTokens, 64 of k] for each tile of a round, into a ring of stages that all consumers read
//   epilogue       sums of the kKWarps warps of a strip meet in shared memory and are added in the order of q
// clang-format on
//
// A sum over a group's k (of whole rows over 128) is multiplied by its scale and added to the sum of its strip, in
// float32, in ascending order. That order depends on kKWarps and kRound alone, which follow from n, the kind of weight
// and whether the tokens are more than 16.
#pragma once

#include "sm90/common/setmaxnreg.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/linear/mixed_mma_consumer.cuh"

namespace radix::linear {

template <class Tile>
class MixedProducer {
 public:
  __device__ static void run(const MixedParams& p, const MixedShared<Tile>& s, const sm90::TensorMap* x_map) {
    sm90::pdl_wait();
    sm90::Ring<Tile::kXStages> ring;
    const int rounds = Tile::rounds(p);
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x)
      for (int i = 0; i < rounds; i++, ring.next()) {
        uint64_t* full = &s.full[ring.index];
        sm90::barrier_wait(&s.empty[ring.index], ring.parity ^ 1);
        sm90::barrier_arrive_expect(full, Tile::kXStageBytes);
        load(p, s.x + ring.index * Tile::kXStageBytes, x_map, full, i * Tile::kStageTiles);
      }
  }

 private:
  // Tiles of k beyond the last one come as zeros.
  __device__ static void load(const MixedParams& p, char* to, const sm90::TensorMap* x_map, uint64_t* full, int first) {
    if (p.x_by_tiles) return sm90::tma_load_3d(to, x_map, full, 0, 0, first);
#pragma unroll 1
    for (int i = 0; i < Tile::kStageTiles; i++)
      sm90::tma_load_2d(to + i * Tile::kXBytes, x_map, full, (first + i) * kTileK, 0);
  }
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    mixed_mma_kernel(const __grid_constant__ sm90::TensorMap x_map, const __grid_constant__ MixedParams p) {
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[Tile::kXStages], empty[Tile::kXStages];
  char* base = dynamic + (-sm90::shared_address(dynamic) & 1023);
  MixedShared<Tile> s;
  s.x = base;
  s.partials = reinterpret_cast<float*>(base + Tile::kXStages * Tile::kXStageBytes);
  s.full = full;
  s.empty = empty;
  sm90::pdl_trigger();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kXStages; i++) {
      sm90::barrier_init(&full[i], 1);
      sm90::barrier_init(&empty[i], Tile::kWarps * sm90::kWarpArrivals);
    }
    sm90::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < Tile::kConsumers) {
    if constexpr (Tile::kShareRegisters) sm90::setmaxnreg_inc<Tile::kConsumerRegisters>();
    const MixedWalk<Tile> walk(p);
    MixedConsumer<T, Tile, MixedWalk<Tile>>(walk, s).run(MixedEpilogue<T, Tile>(p, s.partials));
  } else {
    if constexpr (Tile::kShareRegisters) sm90::setmaxnreg_dec<Tile::kProducerRegisters>();
    if (threadIdx.x == Tile::kConsumers) MixedProducer<Tile>::run(p, s, &x_map);
  }
}

}  // namespace radix::linear
