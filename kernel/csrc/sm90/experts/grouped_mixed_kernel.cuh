// Fused experts over weights of 4 bits, on wgmma: result[place, f] = w[e][f, :] @ x[place, :], the places of expert e
// being begins[e] .. ends[e] - 1. Weights are wgmma's 64-row operand and come from registers, where their codes become
// T; pairs are its columns, whose number a tile chooses (16 .. kMaxColumns).
//
//   block: persistent, one a multiprocessor; tiles of 2 x 64 weight rows by up to kMaxColumns pairs of one expert;
//   those of the same weight rows follow each other, so that the weights come from memory once. producer (a thread):
//   bulk copies of the codes, scales and zero points of 2 x 64 rows and 128 of k, as they are packed, and TMA of the
//   pairs' rows, into a ring of stages that runs on from tile to tile. consumers (two warpgroups): 64 rows each. A
//   lane's 16 bytes of codes are its operands of 4 steps of 16 of k; those of the next 4 are widened while these are
//   multiplied. sums: a group's products are summed by the tensor cores from zero, multiplied by the row's scale in
//   float32 and added, in ascending k. Of MXFP4 in bf16 the scale goes into the operand, which holds the product
//   exactly. epilogue: bias; where gated the first warpgroup has 64 gate rows and the second their up rows, of which
//   they exchange half: silu(gate) * up or the clamped SwiGLU; rows of the result in pieces of 16 bytes.
//
// Shared memory (kSharedBytes and static arrays):
//
//   | ring of stages | kStages x kStageBytes | x: 2 parts of kMaxColumns x 128 bytes (64 of k, swizzled)       |
//   |                |                       | codes: of each warpgroup 2 tiles of 64 x 64, 2 KiB each         |
//   |                |                       | scales, zero points: of each warpgroup, groups x 64 rows        |
//   | epilogue       | kEpilogueBytes        | what gate and up exchange, then 64 pairs of each warpgroup      |
//   | full, empty    | kStages each          | barriers (static)                                               |
//   | schedule       | 12 KiB                | of each expert: first and last pair, first tile (static)        |
#pragma once

#include <type_traits>

#include "sm90/common/pdl.cuh"
#include "sm90/common/setmaxnreg.cuh"
#include "sm90/common/wgmma_registers.cuh"
#include "sm90/experts/grouped_mixed_epilogue.cuh"
#include "sm90/experts/grouped_mixed_operands.cuh"
#include "sm90/experts/grouped_mixed_producer.cuh"

namespace radix::experts {

template <class Tile>
class GroupedMixedConsumer {
 public:
  using T = typename Tile::T;
  using Ring = sm90::Ring<Tile::kStages>;
  static constexpr sm90::Operand kType = sm90::kOperand<T>;

  __device__ GroupedMixedConsumer(const GroupedMixedParams& p, char* stages, uint64_t* full, uint64_t* empty)
      : p_(p),
        stages_(stages),
        full_(full),
        empty_(empty),
        group_(threadIdx.x / 128 - 1),
        row_(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
        epilogue_(p, stages + Tile::kStages * Tile::kStageBytes, group_) {}

  __device__ void run(const TilePlace& at) {
    const int columns = Tile::columns(at.count);
    if constexpr (Tile::kMaxColumns <= 64) {
      columns == 16 ? run<16>(at) : columns == 32 ? run<32>(at) : run<64>(at);
    } else {
      columns == 64 ? run<64>(at) : columns == 96 ? run<96>(at) : run<128>(at);
    }
  }

 private:
  // A tile's codes as operands of its 4 steps.
  using Operands = uint32_t[4][4];

  template <int kColumns>
  __device__ void run(const TilePlace& at) {
    float sum[kColumns / 2] = {};
    if constexpr (Tile::kFolded) {
      multiply_folded<kColumns>(sum);
    } else {
      multiply_scaled<kColumns>(sum);
    }
    epilogue_.template store<kColumns>(at, sum);
  }

  // This warp has read a stage.
  __device__ void release(int stage) const { sm90::barrier_arrive_warp(&empty_[stage]); }
  // Groups of a chunk that exist: the last ones of k may not.
  __device__ int groups_of(int chunk) const {
    return min(Tile::kGroupsOfChunk, p_.weights.groups - chunk * Tile::kGroupsOfChunk);
  }

  // Tile `half` of a stage. Past the end of k that is whatever the stage held before: any code is a number, and x is
  // zero there. Operands of a pending product must not be written.
  __device__ void widen(Operands& a, const Ring& ring, int half, int groups) const {
    using namespace sm90;
    const uint32_t stage = shared_address(stages_) + ring.index * Tile::kStageBytes;
    const uint32_t codes = stage + Tile::kCodesAt + group_ * Tile::kCodeBytes + half * linear::tile_bytes(Tile::kCode);
    const uint32_t scales = stage + Tile::kScalesAt + group_ * Tile::kScaleBytes;
    const uint32_t zeros = stage + Tile::kZerosAt + group_ * Tile::kZeroBytes;
    const uint4 words = load_shared_uint4(codes + threadIdx.x % 128 * 16);
    const uint32_t of_step[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int g = 0; g < Tile::kGroupsOfTile; g++) {
      const int group = min((half * linear::kTileK + g * 32) / Tile::kGroup, groups - 1);
      const int row = group * linear::kTileRows + row_;
      std::conditional_t<Tile::kFolded, ScaledE2m1Operands, GroupOperands<T, Tile::kCode>> operands;
      if constexpr (Tile::kFolded) operands.scale_by(load_shared_u8(scales + row), load_shared_u8(scales + row + 8));
      if constexpr (Tile::kZeroBytes > 0) {
        if (p_.weights.zeros) operands.count_from(load_shared_u8(zeros + row), load_shared_u8(zeros + row + 8));
      }
#pragma unroll
      for (int i = 0; i < Tile::kStepsOfGroup; i++)
        operands.widen(of_step[g * Tile::kStepsOfGroup + i], a[g * Tile::kStepsOfGroup + i]);
    }
  }

  // Starts the products of steps kFirst .. kFirst + kSteps - 1 of a tile: to + them where `more`, else they alone.
  template <int kColumns, int kFirst, int kSteps>
  __device__ void start(float (&to)[kColumns / 2], const Operands& a, int stage, int half, bool more) const {
    using namespace sm90;
    const uint64_t x = swizzled_operand(stages_ + stage * Tile::kStageBytes + half * Tile::kPartBytes);
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

  __device__ void await(const Ring& ring) const { sm90::barrier_wait(&full_[ring.index], ring.parity); }

  // Scales within the operands: one sum over all of k.
  template <int kColumns>
  __device__ void multiply_folded(float (&sum)[kColumns / 2]) {
    using namespace sm90;
    Operands first, second;
    await(ring_);
    widen(first, ring_, 0, groups_of(0));
    int last = 0;
    for (int chunk = 0; chunk < p_.chunks; chunk++) {
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
      if (chunk + 1 < p_.chunks) {
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
    float low[Tile::kGroupsOfChunk], high[Tile::kGroupsOfChunk];
  };
  __device__ Scales scales_of(const Ring& ring, int groups) const {
    const uint32_t stage = sm90::shared_address(stages_) + ring.index * Tile::kStageBytes;
    const uint32_t from = stage + Tile::kScalesAt + group_ * Tile::kScaleBytes;
    Scales s;
#pragma unroll
    for (int g = 0; g < Tile::kGroupsOfChunk; g++) {
      const int row = min(g, groups - 1) * linear::kTileRows + row_;
      s.low[g] = load_scale<Tile::kCode>(from, row, p_.scale_type);
      s.high[g] = load_scale<Tile::kCode>(from, row + 8, p_.scale_type);
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
    constexpr int kSteps = Tile::kStepsOfGroup, kGroups = Tile::kGroupsOfTile;
    constexpr bool kWide = Tile::kGroup > linear::kTileK;  // a group is both tiles of a chunk
    Operands first, second;
    float part[kColumns / 2];
    await(ring_);
    widen(first, ring_, 0, groups_of(0));
    for (int chunk = 0; chunk < p_.chunks; chunk++) {
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
      if (chunk + 1 < p_.chunks) {
        await(ring_);
        widen(first, ring_, 0, groups_of(chunk + 1));
      }
      add_group(Tile::kGroupsOfChunk - 1);
      keep(second);
      release(stage);
    }
  }

  const GroupedMixedParams& p_;
  char* stages_;
  uint64_t *full_, *empty_;
  const int group_, row_;  // row_: this lane's first of the warpgroup's 64; its other is 8 further on
  GroupedMixedEpilogue<Tile> epilogue_;
  Ring ring_;
};

template <class Tile>
__global__ void __launch_bounds__(kGroupedSwapAbThreads, 1)
    grouped_mixed_kernel(const __grid_constant__ sm90::TensorMap x_map, const __grid_constant__ GroupedMixedParams p) {
  using namespace sm90;
  constexpr int kStages = Tile::kStages;
  extern __shared__ char unaligned[];
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ Schedule schedule;
  static_assert(shared_fits(Tile::kSharedBytes + sizeof(full) + sizeof(empty) + sizeof(schedule)));
  char* stages = unaligned + (-shared_address(unaligned) & 1023);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&x_map);
    for (int i = 0; i < kStages; i++) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kWarpArrivals * 8);  // the consumer warps
    }
    barrier_init_fence();
  }
  if (!p.placed) pdl_wait();
  if (threadIdx.x < 32) schedule.find(p, Tile::kMaxColumns);
  __syncthreads();
  const int tiles = schedule.first[p.named] * p.row_tiles, first = blockIdx.x, width = gridDim.x;
  const auto place = [&](int tile) { return TilePlace::find<Tile>(schedule, p, tile, 0); };

  if (threadIdx.x < 128) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) {
      GroupedMixedProducer<Tile> self(p, stages, full);
      int ahead = 0;
      if (first < tiles) {
        self.begin(place(first));
        for (Ring<kStages> ring; ahead < min(kStages, p.chunks); ahead++, ring.next()) self.load_weights(ring, ahead);
      }
      pdl_wait();
      pdl_trigger();
      Ring<kStages> ring;
      for (int tile = first; tile < tiles; tile += width) {
        self.begin(place(tile));
        for (int chunk = 0; chunk < p.chunks; chunk++, ring.next()) {
          if (ahead > 0) {
            ahead--;
          } else {
            barrier_wait(&empty[ring.index], ring.parity ^ 1);
            self.load_weights(ring, chunk);
          }
          self.load_pairs(ring, chunk, &x_map);
        }
      }
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    pdl_wait();
    GroupedMixedConsumer<Tile> self(p, stages, full, empty);
    for (int tile = first; tile < tiles; tile += width) self.run(place(tile));
  }
}

}  // namespace radix::experts
