// Fused experts over packed weights for few pairs of an expert, on mma.sync: out[pair, r] = w[e][r, :] @ x[pair, :].
// Bound by bytes: each named expert is read once, but for one with more pairs than a tile holds.
//
// The products are those of linear/mixed_mma_kernel.cuh: 16 rows of a weight are the product's rows, 8 or 16 pairs of
// its expert the columns.
//
// clang-format off
//   block          finds the named experts and their pairs (grouped_mixed_mma_plan.cuh), then takes tiles of up to
//                  kStrips strips of an expert at a time
//   consumer warp  (linear/mixed_mma_consumer.cuh) codes, scales and zero points come from memory into registers two
//                  rounds ahead, from tile to tile and so from expert to expert
//   producers      a warpgroup: cp.async of the pairs' rows from where they lie, a piece of 16 bytes a thread, into the
//                  ring of stages. Columns without a pair hold what was there: nothing of them is stored
//   epilogue       sums -> shared memory, where those of two tiles have room -> added in the order of the warps -> bias,
//                  gate -> 8-byte stores
// clang-format on
//
// The second product's blocks take their places, find the plan and load their first weights while the first one ends:
// the ids were there before the first began (pdl.cuh).
//
// Shared memory: what find() needs, then x and two sets of partials as in linear/mixed_mma_tile.cuh (dynamic); the plan
// and the barriers (static).
#pragma once

#include "sm90/common/cp_async.cuh"
#include "sm90/common/setmaxnreg.cuh"
#include "sm90/experts/grouped_mixed_mma_epilogue.cuh"
#include "sm90/linear/mixed_mma_consumer.cuh"

namespace radix::experts {

// Rows of x of a tile's pairs; each thread of the warpgroup has one of them, and a piece of 16 bytes of a tile of k.
template <class Tile>
class MixedRowProducer {
 public:
  __device__ static void run(const GroupedMixedMmaParams& p, const GroupedMixedMmaWalk<Tile>& walk,
                             const linear::MixedShared<Tile>& s) {
    const int thread = threadIdx.x - Tile::kConsumers, piece = thread % Tile::kPieces;
    const int row = thread / Tile::kPieces % Tile::kTokens, k_tile = thread / Tile::kPieces / Tile::kTokens;
    const uint32_t to = sm90::shared_address(s.x) + k_tile * Tile::kXBytes + row * 128 + (piece ^ row % 8) * 16;
    const int rounds = Tile::rounds(p);
    sm90::pdl_wait();
    sm90::Ring<Tile::kXStages> ring;
    for (int tile = blockIdx.x; tile < walk.tiles(); tile += gridDim.x) {
      const bool has_row = row < walk.pairs(tile);
      const char* from = has_row ? p.x + walk.pair(tile, row) / p.x_pairs * p.x_step : p.x;
      int at = k_tile * 128 + piece * 16;
      for (int i = 0; i < rounds; i++, ring.next()) {
        sm90::barrier_wait(&s.empty[ring.index], ring.parity ^ 1);
        if (has_row) copy(to + ring.index * Tile::kXStageBytes, from, at, p.x_bytes);
        at += Tile::kStageTiles * 128;
        sm90::cp_async_mbarrier_arrive(&s.full[ring.index]);
      }
    }
  }

 private:
  // What lies beyond the row comes as zeros.
  __device__ static void copy(uint32_t to, const char* from, int at, int bytes) {
#pragma unroll
    for (int t = 0; t < Tile::kStageTiles; t += Tile::kTilesAtOnce) {
      const int here = at + t * 128;
      const bool inside = here < bytes;
      sm90::cp_async_16(to + t * Tile::kXBytes, from + (inside ? here : 0), inside);
    }
  }
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    grouped_mixed_mma_kernel(const __grid_constant__ GroupedMixedMmaParams p) {
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[Tile::kXStages], empty[Tile::kXStages];
  __shared__ typename Tile::Plan plan;
  char* base = dynamic + (-sm90::shared_address(dynamic) & 1023);
  linear::MixedShared<Tile> s;
  s.x = base;
  s.partials = reinterpret_cast<float*>(base + Tile::kXStages * Tile::kXStageBytes);
  s.full = full;
  s.empty = empty;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kXStages; i++) {
      sm90::barrier_init(&full[i], Tile::kProducers);
      sm90::barrier_init(&empty[i], Tile::kWarps * sm90::kWarpArrivals);
    }
    sm90::barrier_init_fence();
  }
  plan.clear(p.routing, base);
  if (p.first) sm90::pdl_wait();
  sm90::pdl_trigger();                                // after the wait: the ids are there when the next kernel starts
  plan.find(p.routing, p.units, p.most_units, base);  // its barriers also show the ring's to all
  const GroupedMixedMmaWalk<Tile> walk(p, plan);
  if (threadIdx.x < Tile::kConsumers) {
    sm90::setmaxnreg_inc<Tile::kConsumerRegisters>();
    linear::MixedConsumer<T, Tile, GroupedMixedMmaWalk<Tile>> consumer(walk, s);
    consumer.run_on(GroupedMixedMmaEpilogue<T, Tile>(p, walk, s.partials));
  } else {
    sm90::setmaxnreg_dec<Tile::kProducerRegisters>();
    MixedRowProducer<Tile>::run(p, walk, s);
  }
}

}  // namespace radix::experts
