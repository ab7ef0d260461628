// The products of a tile on wgmma: 64 rows of a packed weight by 16 to 128 rows of x. Weights are the instruction's
// 64-row operand and come from registers, where their codes become T; x is its columns.
//
// A lane's 16 bytes of 4-bit codes are its operands of 4 steps of 16 of k; those of the next 4 are widened while these
// are multiplied. A group's products are summed by the tensor cores from zero, multiplied by the row's scale in float32
// and added, in ascending k. Of MXFP4 in bf16 the scale goes into the operand, which holds the product exactly.
#pragma once

#include <type_traits>

#include "sm90/common/mbarrier.cuh"
#include "sm90/common/wgmma_registers.cuh"
#include "sm90/linear/mixed_wgmma_operands.cuh"
#include "sm90/linear/mixed_wgmma_pipeline.cuh"

namespace radix::linear {

// Of one consumer warpgroup, of which there are two after the producer's.
template <class Pipeline>
class MixedMainloop {
 public:
  using T = typename Pipeline::T;
  using Ring = sm90::Ring<Pipeline::kStages>;
  static constexpr sm90::Operand kType = sm90::kOperand<T>;
  static constexpr Code kCode = Pipeline::kCode;

  __device__ MixedMainloop(const MixedWeights& w, char* stages, uint64_t* full, uint64_t* empty)
      : w_(w),
        stages_(stages),
        full_(full),
        empty_(empty),
        group_(threadIdx.x / 128 - 1),
        row_(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) {}

  // The sums of the next tile, which are zero before.
  template <int kColumns>
  __device__ void multiply(float (&sum)[kColumns / 2]) {
    if constexpr (Pipeline::kFolded) {
      multiply_folded<kColumns>(sum);
    } else {
      multiply_scaled<kColumns>(sum);
    }
  }

 private:
  // A tile's codes as operands of its 4 steps.
  using Operands = uint32_t[4][4];

  __device__ void await(const Ring& ring) const { sm90::barrier_wait(&full_[ring.index], ring.parity); }
  // This warp has read a stage.
  __device__ void release(int stage) const { sm90::barrier_arrive_warp(&empty_[stage]); }
  // Groups of a chunk: the last ones of k may not exist; one of whole rows is that of every chunk.
  __device__ int groups_of(int chunk) const {
    return min(Pipeline::kGroupsOfChunk, max(1, w_.groups - chunk * Pipeline::kGroupsOfChunk));
  }
  __device__ uint32_t stage_of(const Ring& ring) const {
    return sm90::shared_address(stages_) + ring.index * Pipeline::kStageBytes;
  }

  // This lane's words of 4 steps.
  struct Words {
    uint32_t at[4][kStepWords<kCode>];
  };
  __device__ static Words load_words(uint32_t tile) {
    Words words;
    const uint32_t strip = tile + threadIdx.x % 128 / 32 * strip_bytes(kCode) + threadIdx.x % 32 * 16;
#pragma unroll
    for (int h = 0; h < kStepWords<kCode>; h++) {
      const uint4 v = sm90::load_shared_uint4(strip + h * 512);
      const uint32_t four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        constexpr int kSteps = 4 / kStepWords<kCode>;
        words.at[h * kSteps + i / kStepWords<kCode>][i % kStepWords<kCode>] = four[i];
      }
    }
    return words;
  }

  // Tile `half` of a stage. Past the end of k that is whatever the stage held before: any code is a number, and x is
  // zero there. Operands of a pending product must not be written.
  __device__ void widen(Operands& a, const Ring& ring, int half, int groups) const {
    using namespace sm90;
    const uint32_t stage = stage_of(ring);
    const uint32_t scales = stage + Pipeline::kScalesAt + group_ * Pipeline::kScaleBytes;
    const uint32_t zeros = stage + Pipeline::kZerosAt + group_ * Pipeline::kZeroBytes;
    const Words words =
        load_words(stage + Pipeline::kCodesAt + group_ * Pipeline::kCodeBytes + half * tile_bytes(kCode));
#pragma unroll
    for (int g = 0; g < Pipeline::kGroupsOfTile; g++) {
      const int row = min((half * kTileK + g * 32) / Pipeline::kGroup, groups - 1) * kTileRows + row_;
      std::conditional_t<Pipeline::kFolded, ScaledE2m1Operands, GroupOperands<T, kCode>> operands;
      if constexpr (Pipeline::kFolded)
        operands.scale_by(load_shared_u8(scales + row), load_shared_u8(scales + row + 8));
      if constexpr (Pipeline::kZeroBytes > 0) {
        if (w_.zeros) operands.count_from(load_shared_u8(zeros + row), load_shared_u8(zeros + row + 8));
      }
#pragma unroll
      for (int i = g * Pipeline::kStepsOfGroup; i < (g + 1) * Pipeline::kStepsOfGroup; i++)
        operands.widen(words.at[i], a[i]);
    }
  }

  // Starts the products of steps kFirst .. kFirst + kSteps - 1 of a tile: to + them where `more`, else they alone.
  template <int kColumns, int kFirst, int kSteps>
  __device__ void start(float (&to)[kColumns / 2], const Operands& a, int stage, int half, bool more) const {
    using namespace sm90;
    const uint64_t x = swizzled_operand(stages_ + stage * Pipeline::kStageBytes + half * Pipeline::kPartBytes);
    wgmma_fence();
#pragma unroll
    for (int i = kFirst; i < kFirst + kSteps; i++)
      WgmmaRegisters<kType, kColumns, false>::run(to, a[i], next_k(x, i), more || i > kFirst);
    wgmma_commit();
  }

  // The products that read them have ended.
  __device__ static void keep(const Operands& a) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) asm volatile("" ::"r"(a[i][j]));
  }

  // Scales within the operands: one sum over all of k.
  template <int kColumns>
  __device__ void multiply_folded(float (&sum)[kColumns / 2]) {
    using namespace sm90;
    Operands first, second;
    await(ring_);
    widen(first, ring_, 0, groups_of(0));
    int last = 0;
    for (int chunk = 0; chunk < w_.chunks; chunk++) {
      const int stage = ring_.index;
      start<kColumns, 0, 4>(sum, first, stage, 0, true);
      wgmma_wait<1>();
      if (chunk > 0) {
        keep(second);
        release(last);
      }
      widen(second, ring_, 1, groups_of(chunk));
      start<kColumns, 0, 4>(sum, second, stage, 1, true);
      wgmma_wait<1>();
      keep(first);
      last = stage;
      ring_.next();
      if (chunk + 1 < w_.chunks) {
        await(ring_);
        widen(first, ring_, 0, groups_of(chunk + 1));
      }
    }
    wgmma_wait<0>();
    keep(second);
    wgmma_hold(sum);
    release(last);
  }

  // The scales of this lane's two rows in the groups of a chunk.
  struct Scales {
    float low[Pipeline::kGroupsOfChunk], high[Pipeline::kGroupsOfChunk];
  };
  __device__ Scales scales_of(const Ring& ring, int groups) const {
    const uint32_t from = stage_of(ring) + Pipeline::kScalesAt + group_ * Pipeline::kScaleBytes;
    Scales s;
#pragma unroll
    for (int g = 0; g < Pipeline::kGroupsOfChunk; g++) {
      const int row = min(g, groups - 1) * kTileRows + row_;
      s.low[g] = load_scale<kCode>(from, row, w_.scale_type);
      s.high[g] = load_scale<kCode>(from, row + 8, w_.scale_type);
    }
    return s;
  }

  // Waits for a group's sum and adds it.
  template <int kColumns>
  __device__ static void add(float (&sum)[kColumns / 2], float (&part)[kColumns / 2], float low, float high) {
    sm90::wgmma_wait<0>();
    sm90::wgmma_hold(part);
#pragma unroll
    for (int i = 0; i < kColumns / 2; i++) sum[i] += part[i] * (i % 4 < 2 ? low : high);
  }

  // Each group's sum is multiplied by its scales.
  template <int kColumns>
  __device__ void multiply_scaled(float (&sum)[kColumns / 2]) {
    using namespace sm90;
    constexpr int kSteps = Pipeline::kStepsOfGroup, kGroups = Pipeline::kGroupsOfTile;
    constexpr bool kWide = Pipeline::kGroup > kTileK;  // a group is both tiles of a chunk
    Operands first, second;
    float part[kColumns / 2];
    await(ring_);
    widen(first, ring_, 0, groups_of(0));
    for (int chunk = 0; chunk < w_.chunks; chunk++) {
      const int stage = ring_.index;
      const Scales scales = scales_of(ring_, groups_of(chunk));
      const auto add_group = [&](int g) { add<kColumns>(sum, part, scales.low[g], scales.high[g]); };
      start<kColumns, 0, kSteps>(part, first, stage, 0, false);
      widen(second, ring_, 1, groups_of(chunk));
      if constexpr (kGroups > 1) {
        add_group(0);
        start<kColumns, kSteps % 4, kSteps>(part, first, stage, 0, false);
      }
      if constexpr (!kWide) add_group(kGroups - 1);
      start<kColumns, 0, kSteps>(part, second, stage, 1, kWide);
      if constexpr (kGroups > 1) {
        add_group(kGroups);
        start<kColumns, kSteps % 4, kSteps>(part, second, stage, 1, false);
      }
      if constexpr (kWide) wgmma_wait<1>();
      keep(first);
      ring_.next();
      if (chunk + 1 < w_.chunks) {
        await(ring_);
        widen(first, ring_, 0, groups_of(chunk + 1));
      }
      add_group(Pipeline::kGroupsOfChunk - 1);
      keep(second);
      release(stage);
    }
  }

  const MixedWeights& w_;
  char* stages_;
  uint64_t *full_, *empty_;
  const int group_, row_;  // row_: this lane's first of the warpgroup's 64; its other is 8 further on
  Ring ring_;
};

// The barriers of the stages, by one thread.
template <class Pipeline>
__device__ inline void init_mixed_barriers(uint64_t* full, uint64_t* empty) {
  for (int i = 0; i < Pipeline::kStages; i++) {
    sm90::barrier_init(&full[i], 1);
    sm90::barrier_init(&empty[i], sm90::kWarpArrivals * 8);  // the consumer warps
  }
  sm90::barrier_init_fence();
}

}  // namespace radix::linear
