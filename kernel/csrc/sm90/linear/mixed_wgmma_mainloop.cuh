// The products of a tile on wgmma: 64 rows of a packed weight a warpgroup by 16 to 256 rows of x. Weights are the
// instruction's 64-row operand and come from registers, where their codes become numbers of T: code times scale,
// rounded to T (mixed_wgmma_operands.cuh). So one float32 sum runs over all of k, in ascending order, and the tensor
// cores wait for nobody: while they multiply one 64 of k, the next one is widened into other registers.
#pragma once

#include <type_traits>

#include "sm90/common/cluster.cuh"
#include "sm90/common/wgmma_registers.cuh"
#include "sm90/linear/mixed_wgmma_operands.cuh"
#include "sm90/linear/mixed_wgmma_producer.cuh"

namespace radix::linear {

// Of one consumer warpgroup; they stand behind the producers'. Warpgroup i has strip i % kStrips and part i / kStrips
// of a stage's k.
template <class Pipeline>
class MixedMainloop {
 public:
  using T = typename Pipeline::T;
  using Ring = sm90::Ring<Pipeline::kStages>;
  static constexpr sm90::Operand kType = sm90::kOperand<T>;
  static constexpr Code kCode = Pipeline::kCode;

  __device__ MixedMainloop(const MixedWeights& w, const MixedX& x, MixedChunks chunks, char* stages, uint64_t* full,
                           uint64_t* empty)
      : w_(w), chunks_(chunks) {
    const int group = threadIdx.x / 128 - 1, strip = group % Pipeline::kStrips, warp = threadIdx.x % 128 / 32;
    const int lane = threadIdx.x % 32, row = warp * 16 + lane / 4;
    const int scale_row = kCode == Code::e2m1 ? warp * 16 + lane / 4 * 2 : row;  // rows g and g + 8 beside each other
    part_ = group / Pipeline::kStrips;
    stages_ = sm90::shared_address(stages);
    full_ = sm90::shared_address(full);
    empty_ = lane < x.blocks ? sm90::remote_address(empty, x.first + lane) : 0;
    codes_ = Pipeline::kCodesAt + strip * Pipeline::kCodeBytes + part() * Pipeline::kTiles * tile_bytes(kCode) +
             warp * strip_bytes(kCode) + lane * 16;
    scales_ = Pipeline::kScalesAt + strip * Pipeline::kScaleBytes + scale_row * w.scale_bytes;
    zeros_ = Pipeline::kZerosAt + strip * Pipeline::kZeroBytes + row;
    // Registers, in place of what they are made of.
    for (uint32_t* offset : {&stages_, &full_, &empty_, &codes_, &scales_, &zeros_}) asm volatile("" : "+r"(*offset));
  }

  // The sums of the next tile, which are zero before.
  template <int kColumns>
  __device__ void multiply(float (&sum)[kColumns / 2]) {
    const int count = tiles_of_part(), stages = (count + Pipeline::kTiles - 1) / Pipeline::kTiles;
    Operands even, odd;
    chunk_ = chunks_.first;
    last_ = -1;
    if (count > 0) {
      await();
      widen(even, 0);
    }
    int i = 0;
    for (; i + 1 < count; i += 2) {
      step<kColumns, 0>(sum, even, odd, true);
      step<kColumns, 1>(sum, odd, even, i + 2 < count);
    }
    if (i < count) {
      step<kColumns, 0>(sum, even, odd, false);
      if constexpr (Pipeline::kTiles == 2) ring_.next();
    }
    sm90::wgmma_wait<0>();
    keep(even);
    keep(odd);
    sm90::wgmma_hold(sum);
    if (last_ >= 0) release(last_);
    for (int s = stages; s < chunks_.count; s++) {  // a last stage without a tile for this part
      await();
      release(ring_.index);
      ring_.next();
    }
  }

 private:
  // A tile's codes as operands of its 4 steps, two and two.
  using Operands = uint32_t[2][2][4];

  __device__ int part() const { return Pipeline::kKParts == 1 ? 0 : part_; }
  __device__ void await() const { sm90::barrier_wait_at(full_ + ring_.index * 8, ring_.parity); }
  // This warp has read a stage, which all blocks with these rows of x wait for.
  __device__ void release(int stage) const {
    if constexpr (sm90::kWarpArrivals > 1) {
      for (int lane = 0; lane < sm90::kPortableCluster; lane++) {
        const uint32_t empty = __shfl_sync(~0u, empty_, lane);
        if (empty) sm90::barrier_arrive_remote_at(empty + stage * 8);
      }
    } else if (empty_) {
      sm90::barrier_arrive_remote_at(empty_ + stage * 8);
    }
  }

  // Tiles of the block's chunks that are this warpgroup's.
  __device__ int tiles_of_part() const {
    constexpr int kTiles = Pipeline::kChunkTiles;
    const int first = chunks_.first * kTiles;
    const int count = min(chunks_.count * kTiles, w_.k_tiles - first);
    return (count - part() + Pipeline::kKParts - 1) / Pipeline::kKParts;
  }

  // This lane's words of 4 steps.
  struct Words {
    uint32_t at[2][2][kStepWords<kCode>];
  };
  __device__ static Words load_words(uint32_t at) {
    Words words;
#pragma unroll
    for (int h = 0; h < kStepWords<kCode>; h++) {
      const uint4 v = sm90::load_shared_uint4(at + h * 512);
      const uint32_t four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int word = h * 4 + i, step = word / kStepWords<kCode>;
        words.at[step / 2][step % 2][word % kStepWords<kCode>] = four[i];
      }
    }
    return words;
  }

  // Tile `tile` of this warpgroup's in the stage. Operands of a pending product must not be written.
  __device__ void widen(Operands& a, int tile) const {
    using namespace sm90;
    const uint32_t stage = stages_ + ring_.index * Pipeline::kStageBytes;
    const Words words = load_words(stage + codes_ + tile * tile_bytes(kCode));
    const int first = (part() * Pipeline::kTiles + tile) * kTileK;  // of k within the stage
#pragma unroll
    for (int g = 0; g < Pipeline::kGroupsOfTile; g++) {
      const int number = number_of(first + g * 32);
      GroupOperands<T, kCode> operands;
      operands.scale_by(stage + scales_ + number * kTileRows * w_.scale_bytes, g % Pipeline::kGroupsOfNumber,
                        w_.scale_type);
      if constexpr (kCode == Code::u4) {
        const uint32_t zeros = stage + zeros_ + number * kTileRows;
        if (w_.zeros) operands.count_from(load_shared_u8(zeros), load_shared_u8(zeros + 8));
      }
      constexpr int kPairs = Pipeline::kStepsOfGroup / 2;
      operands.template widen<kPairs>(words.at + g * kPairs, a + g * kPairs);
    }
  }
  // Which of a stage's scales and zero points is that of its k. The last ones of k may not exist; one of whole rows is
  // that of every stage.
  __device__ int number_of(int k) const {
    if constexpr (Pipeline::kNumbersOfChunk == 1) return 0;
    const int numbers = w_.numbers - chunk_ * Pipeline::kChunk / Pipeline::kNumberK;
    return max(0, min(k / Pipeline::kNumberK, numbers - 1));
  }

  // Starts the products of a tile.
  template <int kColumns>
  __device__ void start(float (&sum)[kColumns / 2], const Operands& a, int tile) const {
    using namespace sm90;
    const int at = part() * Pipeline::kTiles + tile;
    const uint32_t x = operand_low_at(stages_ + ring_.index * Pipeline::kStageBytes + at * Pipeline::kPartBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
      WgmmaRegisters<kType, kColumns, false>::run(sum, a[i / 2][i % 2], operand_at(x + 2 * i), 1);
    wgmma_commit();
  }

  // Multiplies `now`, an even or an odd tile, and, where there are more, widens the next one meanwhile.
  template <int kColumns, int kOdd>
  __device__ void step(float (&sum)[kColumns / 2], const Operands& now, Operands& next, bool more) {
    constexpr bool kOne = Pipeline::kTiles == 1, kEnds = kOne || kOdd;  // the stage ends with this tile
    start<kColumns>(sum, now, kOne ? 0 : kOdd);
    sm90::wgmma_wait<1>();  // the tile before
    keep(next);
    if ((kOne || !kOdd) && last_ >= 0) release(last_);
    last_ = ring_.index;
    if constexpr (kEnds) {
      ring_.next();
      chunk_++;
    }
    if (!more) return;
    if constexpr (kEnds) await();
    widen(next, kOne ? 0 : 1 - kOdd);
  }

  // The products that read them have ended.
  __device__ static void keep(const Operands& a) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) asm volatile("" ::"r"(a[i / 2][i % 2][j]));
  }

  const MixedWeights& w_;
  const MixedChunks chunks_;
  int part_;
  uint32_t stages_, full_, empty_;   // addresses; empty_: in the block at which this lane arrives, or 0
  uint32_t codes_, scales_, zeros_;  // of this lane, from the beginning of a stage
  Ring ring_;
  int chunk_ = 0, last_ = -1;  // last_: the stage of the tile before
};

}  // namespace radix::linear
