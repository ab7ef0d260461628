// The products of a mixed_mma warp: codes from registers, x from the ring of stages.
#pragma once

#include "sm90/common/ldmatrix.cuh"
#include "sm90/common/mma_m16n8k16.cuh"
#include "sm90/common/pdl.cuh"
#include "sm90/linear/mixed_mma_epilogue.cuh"
#include "sm90/linear/mixed_mma_weights.cuh"
#include "sm90/linear/mixed_wgmma_operands.cuh"

namespace radix::linear {

template <class T, class Tile, class Walk>
class MixedConsumer {
 public:
  static constexpr int kUnits = Tile::kUnits, kColumns = Tile::kTokens / 8;
  static constexpr Code kCode = Tile::kCode;
  static constexpr bool kFolded = kFoldsScales<T, kCode>;

  __device__ MixedConsumer(const Walk& walk, const MixedShared<Tile>& s)
      : walk_(walk), row_warp_(threadIdx.x / 32 / Tile::kKWarps), k_warp_(threadIdx.x / 32 % Tile::kKWarps) {
    const int lane = threadIdx.x % 32;
    x_ = sm90::shared_address(s.x) + k_warp_ * Tile::kRound * Tile::kXBytes + lane % 8 * 128 +
         ((lane / 8) ^ (lane % 8)) * 16;
    full_ = sm90::shared_address(s.full);
    empty_ = sm90::shared_address(s.empty);
    if constexpr (Tile::kSharedScales) {  // there is room for them in place of what they are made of
      for (uint32_t* address : {&x_, &full_, &empty_}) asm volatile("" : "+r"(*address));
    }
  }

  template <class Epilogue>
  __device__ void run(const Epilogue& epilogue) {
    if (walk_.waits()) sm90::pdl_wait();
    WeightStream<Tile, Walk> weights(walk_, row_warp_, k_warp_);
    MixedRound<Tile> even, odd;
    start(weights, even, odd);
    if (!walk_.waits()) sm90::pdl_wait();
    const int rounds = Tile::rounds(walk_.form());
    for (int tile = blockIdx.x; tile < walk_.tiles(); tile += gridDim.x) {
      begin(tile);
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
      leave(epilogue);
      epilogue.finish(tile);
      sm90::named_barrier(1, Tile::kConsumers);
    }
  }

  // The same for many small tiles: rounds run on from one to the next, so that no registers change places whose codes
  // are still on their way. The sums of two tiles lie beside each other: nobody waits until all have ended a tile.
  template <class Epilogue>
  __device__ void run_on(Epilogue epilogue) {
    WeightStream<Tile, Walk> weights(walk_, row_warp_, k_warp_);
    MixedRound<Tile> even, odd;
    start(weights, even, odd);
    sm90::pdl_wait();
    int tile = blockIdx.x;
    if (tile >= walk_.tiles()) return;
    begin(tile);
    const auto goes_on = [&](MixedRound<Tile>& round) {
      consume(round, weights);
      if (k_left_ > 0) return true;
      leave(epilogue);
      epilogue.finish(tile);
      epilogue.change();
      tile += gridDim.x;
      if (tile >= walk_.tiles()) return false;
      begin(tile);
      return true;
    };
    while (goes_on(even) && goes_on(odd)) {
    }
  }

 private:
  using Sums = float[kUnits][kColumns][4];
  static constexpr int kRun = Tile::kRound % 2 ? 1 : 2;

  __device__ static void clear(Sums& sums) {
#pragma unroll
    for (int u = 0; u < kUnits; u++)
#pragma unroll
      for (int j = 0; j < kColumns; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[u][j][i] = 0;
  }

  __device__ static void start(WeightStream<Tile, Walk>& weights, MixedRound<Tile>& even, MixedRound<Tile>& odd) {
    even.clear();
    odd.clear();
    weights.load(even);
    weights.load(odd);
  }
  __device__ void begin(int tile) {
    clear(sum_);
    has_rows_ = walk_.strip_of(tile, row_warp_ * kUnits) >= 0;
    k_left_ = walk_.form().k_tiles;
  }
  // Hands the tile's sums to all.
  template <class Epilogue>
  __device__ void leave(const Epilogue& epilogue) const {
#pragma unroll
    for (int u = 0; u < kUnits; u++)
#pragma unroll
      for (int j = 0; j < kColumns; j++) epilogue.store(sum_[u][j], k_warp_, row_warp_ * kUnits + u, j * 8);
    sm90::named_barrier(1, Tile::kConsumers);
  }

  // A round's products; then its registers take the codes of the round after the next.
  __device__ void consume(MixedRound<Tile>& round, WeightStream<Tile, Walk>& weights) {
    sm90::barrier_wait_at(full_ + ring_.index * 8, ring_.parity);
    const uint32_t x = x_ + ring_.index * Tile::kXStageBytes;
    if constexpr (Tile::kSharedScales) {
      multiply_by_tiles(round, weights, x);
    } else if (has_rows_) {
      multiply(round, x);
    }
    __syncwarp();
    sm90::barrier_arrive_warp_at(empty_ + ring_.index * 8);
    Tile::kSharedScales ? weights.advance() : weights.load(round);
    k_left_ -= Tile::kStageTiles;
    ring_.next();
  }

  // e2m1: a tile's registers take the next codes as soon as it has been multiplied, so that these are on their way for
  // almost two rounds.
  __device__ void multiply_by_tiles(MixedRound<Tile>& round, const WeightStream<Tile, Walk>& weights, uint32_t x) {
    const int tiles = has_rows_ ? k_left_ - k_warp_ * Tile::kRound : 0;
#pragma unroll
    for (int first = 0; first < Tile::kRound; first += kRun) multiply_run(round, weights, first, tiles, x);
  }
  // kRun of the round's tiles, of which there are `tiles`. Most runs are whole and without large scales: their products
  // are one run of instructions. To ask about scales is to wait for them, hence not about all of a round at once.
  __device__ void multiply_run(MixedRound<Tile>& round, const WeightStream<Tile, Walk>& weights, int first, int tiles,
                               uint32_t x) {
    const bool large = kFolded && __any_sync(~0u, ScaledE2m1Operands::is_large(round.any_scales(first, kRun)));
    if (tiles >= first + kRun && !large) {
#pragma unroll
      for (int i = first; i < first + kRun; i++) {
        multiply_tile(round, i, false, x);
        weights.load_piece(round, i);
      }
      return;
    }
#pragma unroll
    for (int i = first; i < first + kRun; i++) {
      if (i < tiles) multiply_tile(round, i, large, x);
      weights.load_piece(round, i);
    }
  }
  // Tile `tile` of the round, e2m1. large: of its scales.
  __device__ void multiply_tile(const MixedRound<Tile>& round, int tile, bool large, uint32_t x) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      Operands a;
#pragma unroll
      for (int u = 0; u < kUnits; u++) widen_half(round, u, tile * 2 + half, large, a[u]);
      if constexpr (kFolded) {
        multiply_steps(sum_, a, tile * 2 + half, x);
      } else {
        Sums part;
        clear(part);
        multiply_steps(part, a, tile * 2 + half, x);
        fold(part, round, tile * 2 + half);
      }
    }
  }
  __device__ static void widen_half(const MixedRound<Tile>& round, int unit, int half, bool large,
                                    uint32_t (&a)[2][4]) {
    uint32_t words[1][2][1];
    round.words(unit, half, 0, words[0][0]);
    round.words(unit, half, 1, words[0][1]);
    if constexpr (kFolded) {
      ScaledE2m1Operands operands;
      operands.scale_by(round.scales[unit][half / 2][0], half % 2, large);
      operands.widen<1>(words, &a);
    } else {
      const uint32_t none[2] = {};
      widen_steps<T, kCode>(words[0], none, a);
    }
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

  using Operands = uint32_t[kUnits][2][4];  // of two steps

  // Half tile `half` of the round: two steps.
  __device__ void multiply_half(Sums& part, const MixedRound<Tile>& round, int group, int half, uint32_t x) const {
    Operands a;
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      uint32_t zero[2] = {};
      if constexpr (kCode == Code::u4) {
        zero[0] = zero_pair<T>(round.zeros[u][group][0]);
        zero[1] = zero_pair<T>(round.zeros[u][group][1]);
      }
      uint32_t words[2][kStepWords<kCode>];
      round.words(u, half, 0, words[0]);
      round.words(u, half, 1, words[1]);
      widen_steps<T, kCode>(words, zero, a[u]);
    }
    multiply_steps(part, a, half, x);
  }
  __device__ static void multiply_steps(Sums& sums, const Operands& a, int half, uint32_t x) {
    const uint32_t from = (x ^ (half % 2 * 64)) + half / 2 * Tile::kXBytes;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      uint32_t b[4];
      sm90::ldmatrix_x4(b, from + j * 1024);
#pragma unroll
      for (int u = 0; u < kUnits; u++) {
        sm90::mma<T>(sums[u][j], a[u][0], b[0], b[1]);
        sm90::mma<T>(sums[u][j], a[u][1], b[2], b[3]);
      }
    }
  }

  __device__ void fold(const Sums& part, const MixedRound<Tile>& round, int group) {
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      const float scale[2] = {round.scale(walk_.form(), u, group, 0), round.scale(walk_.form(), u, group, 1)};
#pragma unroll
      for (int j = 0; j < kColumns; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum_[u][j][i] = fmaf(scale[i / 2], part[u][j][i], sum_[u][j][i]);
    }
  }

  const Walk& walk_;
  const int row_warp_, k_warp_;
  uint32_t x_, full_, empty_;  // addresses; x_: of this lane's rows
  sm90::Ring<Tile::kXStages> ring_;
  bool has_rows_ = false;
  int k_left_ = 0;  // tiles of k that all have still to multiply
  Sums sum_;
};

}  // namespace radix::linear
