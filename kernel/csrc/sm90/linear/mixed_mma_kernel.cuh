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

#include "sm90/common/ldmatrix.cuh"
#include "sm90/common/mma_m16n8k16.cuh"
#include "sm90/common/pdl.cuh"
#include "sm90/common/setmaxnreg.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/linear/mixed_mma_epilogue.cuh"
#include "sm90/linear/mixed_mma_weights.cuh"

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
class MixedConsumer {
 public:
  static constexpr int kUnits = Tile::kUnits, kColumns = Tile::kTokens / 8;
  static constexpr Code kCode = Tile::kCode;

  __device__ MixedConsumer(const MixedParams& p, const MixedShared<Tile>& s)
      : p_(p),
        s_(s),
        lane_(threadIdx.x % 32),
        row_warp_(threadIdx.x / 32 / Tile::kKWarps),
        k_warp_(threadIdx.x / 32 % Tile::kKWarps),
        x_at_(k_warp_ * Tile::kRound * Tile::kXBytes + (lane_ % 8) * 128 + ((lane_ / 8) ^ (lane_ % 8)) * 16) {}

  __device__ void run() {
    if (!p_.static_weight) sm90::pdl_wait();
    MixedWeights<Tile> weights(p_, row_warp_, k_warp_);
    MixedRound<Tile> even, odd;
    even.clear();
    odd.clear();
    weights.load(even);
    weights.load(odd);
    if (p_.static_weight) sm90::pdl_wait();
    const int rounds = Tile::rounds(p_);
    const MixedEpilogue<T, Tile> epilogue(p_, s_.partials);
    for (int tile = blockIdx.x; tile < p_.tiles; tile += gridDim.x) {
      clear(sum_);
      has_rows_ = Tile::strip_of(p_, tile, row_warp_ * kUnits) >= 0;
#pragma unroll 1
      for (int i = 0; i < rounds; i += 2) {
        consume(even, weights);
        if (i + 1 < rounds) consume(odd, weights);
      }
      if (rounds % 2) {  // the next tile begins with what the odd rounds would have taken
        const MixedRound<Tile> first = odd;
        odd = even;
        even = first;
      }
#pragma unroll
      for (int u = 0; u < kUnits; u++)
#pragma unroll
        for (int j = 0; j < kColumns; j++) epilogue.store(sum_[u][j], k_warp_, row_warp_ * kUnits + u, j * 8);
      sm90::named_barrier(1, Tile::kConsumers);
      epilogue.finish(tile);
      sm90::named_barrier(1, Tile::kConsumers);
    }
  }

 private:
  using Sums = float[kUnits][kColumns][4];

  __device__ static void clear(Sums& sums) {
#pragma unroll
    for (int u = 0; u < kUnits; u++)
#pragma unroll
      for (int j = 0; j < kColumns; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[u][j][i] = 0;
  }

  // A round's products; then its registers take the codes of the round after the next.
  __device__ void consume(MixedRound<Tile>& round, MixedWeights<Tile>& weights) {
    sm90::barrier_wait(&s_.full[ring_.index], ring_.parity);
    if (has_rows_) multiply(round, sm90::shared_address(s_.x) + ring_.index * Tile::kXStageBytes + x_at_);
    __syncwarp();
    sm90::barrier_arrive_warp(&s_.empty[ring_.index]);
    weights.load(round);
    ring_.next();
  }

  __device__ void multiply(const MixedRound<Tile>& round, uint32_t x) {
    constexpr int kHalves = Tile::kGroup / 32;  // half tiles of a group
#pragma unroll
    for (int group = 0; group < Tile::kRoundGroups; group++) {
      Sums part;
      clear(part);
#pragma unroll
      for (int h = 0; h < kHalves; h++) multiply_half(part, round, group, group * kHalves + h, x);
      fold(part, round, group);
    }
  }

  // Half tile `half` of the round: two steps.
  __device__ void multiply_half(Sums& part, const MixedRound<Tile>& round, int group, int half, uint32_t x) const {
    uint32_t a[kUnits][2][4];
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      uint32_t zero[2] = {};
      if constexpr (kCode == Code::u4) {
        zero[0] = zero_pair<T>(round.zeros[u][group][0]);
        zero[1] = zero_pair<T>(round.zeros[u][group][1]);
      }
#pragma unroll
      for (int step = 0; step < 2; step++) {
        uint32_t words[kStepWords<kCode>];
        round.words(u, half, step, words);
        widen_step<T, kCode>(words, zero, a[u][step]);
      }
    }
    const uint32_t from = (x ^ (half % 2 * 64)) + half / 2 * Tile::kXBytes;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      uint32_t b[4];
      sm90::ldmatrix_x4(b, from + j * 1024);
#pragma unroll
      for (int u = 0; u < kUnits; u++) {
        sm90::mma<T>(part[u][j], a[u][0], b[0], b[1]);
        sm90::mma<T>(part[u][j], a[u][1], b[2], b[3]);
      }
    }
  }

  __device__ void fold(const Sums& part, const MixedRound<Tile>& round, int group) {
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      const float scale[2] = {round.scale(p_, u, group, 0), round.scale(p_, u, group, 1)};
#pragma unroll
      for (int j = 0; j < kColumns; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum_[u][j][i] = fmaf(scale[i / 2], part[u][j][i], sum_[u][j][i]);
    }
  }

  const MixedParams& p_;
  const MixedShared<Tile>& s_;
  const int lane_, row_warp_, k_warp_;
  const uint32_t x_at_;
  sm90::Ring<Tile::kXStages> ring_;
  bool has_rows_ = false;
  Sums sum_;
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
    MixedConsumer<T, Tile>(p, s).run();
  } else {
    if constexpr (Tile::kShareRegisters) sm90::setmaxnreg_dec<Tile::kProducerRegisters>();
    if (threadIdx.x == Tile::kConsumers) MixedProducer<Tile>::run(p, s, &x_map);
  }
}

}  // namespace radix::linear
