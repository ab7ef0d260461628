// Fused experts for sorted pairs, on wgmma: result[place, f] = w[e][f, :] @ x[place, :], the places of expert e being
// offsets[e] .. offsets[e + 1] - 1. Weights are wgmma's 64-row operand and pairs its columns, whose number a tile
// chooses (16 .. kMaxColumns): few pairs waste little, many fill the tensor cores.
//
//   block: persistent, one a multiprocessor; tiles of 128 weight rows by up to kMaxColumns pairs of one expert. An
//   expert's pairs are split evenly over the fewest tiles; those of the same weight rows follow each other, so that the
//   weights come from memory once.
//   producer (a thread): TMA of [128 rows, 128 bytes] of the weights and the pairs' rows into a ring of stages, which
//   runs on over the ends of tiles.
//   consumers (two warpgroups): 64 rows each; one product in flight while the next stage is awaited.
//   end of a tile: silu(gate) * up where gated (the tensor map alternates between 8 gate and 8 up rows, so that a lane
//   has both), transposed through shared memory, rows of the result in pieces of 16 bytes.
#pragma once

#include "cuda/experts/e4m3.h"
#include "cuda/experts/wgmma_narrow.h"
#include "cuda/hopper/matrices.h"
#include "cuda/hopper/pdl.h"
#include "cuda/hopper/registers.h"
#include "cuda/hopper/tma.h"

namespace radix::experts {

constexpr int kManyThreads = 384, kTileRows = 128;

struct ManyParams {
  const int32_t* offsets;  // [named + 1]
  const int32_t* rows;     // row of the result for a place; null: the place
  const int32_t* map;      // [named], or null
  int named;
  int n, row_tiles, chunks;  // result columns; tiles of 128 weight rows; chunks of 128 bytes of k
  Scales scales;             // of FP8 weights
  int up_rows;               // rows from a gate row to its up row
  int expert_rows;           // weight rows from one expert to the next; gated: in units of 8
  char* out;
  int64_t out_step;  // elements
  bool permuted;     // write what meets FP8 weights (ManyFp8)
};

// Of a gated product or not, with FP8 weights or not.
template <bool kGated_, bool kFp8_, int kMaxColumns_>
struct ManyTile {
  static constexpr bool kGated = kGated_, kFp8 = kFp8_;
  static constexpr int kMaxColumns = kMaxColumns_;
  static constexpr int kChunk = kFp8 ? 128 : 64, kParts = kChunk / 64;  // of k a stage; x comes in parts of 64
  static constexpr int kBox = kMaxColumns > 64 ? 32 : 16;               // pairs a copy
  static constexpr int kWeightBytes = kTileRows * 128, kPartBytes = kMaxColumns * 128;
  static constexpr int kStageBytes = kWeightBytes + kParts * kPartBytes;
  static constexpr int kFit = (192 << 10) / kStageBytes, kStages = kFit < 8 ? kFit : 8;
  static constexpr int kFeatures = kGated ? 64 : 128;           // result columns of a tile
  static constexpr int kPieces = kFeatures / 16;                // of 16 bytes, of a row of a warpgroup's results
  static constexpr int kStaged = 64;                            // pairs
  static constexpr int kStagingBytes = kStaged * kPieces * 16;  // of a warpgroup
  static constexpr int kSharedBytes = kStages * kStageBytes + 2 * kStagingBytes + 1024;
};

// The tiles of all experts.
struct Schedule {
  int offsets[kMaxExperts + 1];
  int first[kMaxExperts + 1];  // blocks of pairs before each expert

  // By one warp.
  __device__ void find(const ManyParams& p, int max_columns) {
    const int lane = threadIdx.x % 32, run = (p.named + 31) / 32, begin = lane * run;
    for (int e = lane; e <= p.named; e += 32) offsets[e] = p.offsets[e];
    __syncwarp();
    const auto blocks = [&](int e) { return (offsets[e + 1] - offsets[e] + max_columns - 1) / max_columns; };
    int own = 0;
    for (int e = begin; e < min(begin + run, p.named); e++) own += blocks(e);
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += before;
    }
    if (lane == 31) first[p.named] = sum;
    sum -= own;
    for (int e = begin; e < min(begin + run, p.named); e++) {
      first[e] = sum;
      sum += blocks(e);
    }
  }
};

struct TilePlace {
  int expert, row_tile, begin, count;  // places begin .. begin + count - 1

  __device__ TilePlace(const Schedule& s, const ManyParams& p, int tile) {
    const int block = tile / p.row_tiles;
    int low = 0, high = p.named;  // first[low] <= block < first[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (s.first[middle] <= block ? low : high) = middle;
    }
    const int blocks = s.first[low + 1] - s.first[low], at = tile - s.first[low] * p.row_tiles;
    const int all = s.offsets[low + 1] - s.offsets[low], each = (all + blocks - 1) / blocks;
    row_tile = at / blocks;
    begin = s.offsets[low] + at % blocks * each;
    count = min(each, s.offsets[low + 1] - begin);
    expert = p.map ? p.map[low] : low;
  }
};

// Two floats, rounded, in one word: the first below.
template <class T>
__device__ inline uint32_t round_pair(float first, float second) {
  uint32_t word;
  if constexpr (__is_same(T, bf16)) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  }
  return word;
}

template <class T, class Tile>
class ManyConsumer {
 public:
  using Ring = hopper::Ring<Tile::kStages>;
  static constexpr hopper::Operand kType = __is_same(T, bf16) ? hopper::Operand::bf16 : hopper::Operand::f16;

  __device__ ManyConsumer(const ManyParams& p, const char* stages, char* staging, uint64_t* full, uint64_t* empty)
      : p_(p),
        stages_(stages),
        full_(full),
        empty_(empty),
        group_(threadIdx.x / 128 - 1),
        warp_(threadIdx.x % 128 / 32),
        lane_(threadIdx.x % 32),
        staging_(staging + group_ * Tile::kStagingBytes) {}

  // The instruction's columns: the fewest that hold the pairs.
  __device__ void run(const TilePlace& at) {
    if constexpr (Tile::kFp8) {
      if constexpr (Tile::kMaxColumns <= 64) {
        at.count <= 16 ? run<16>(at) : at.count <= 32 ? run<32>(at) : run<64>(at);
      } else {
        at.count <= 64 ? run<64>(at) : at.count <= 96 ? run<96>(at) : run<128>(at);
      }
    } else if constexpr (Tile::kMaxColumns <= 64) {
      at.count <= 16 ? run<16>(at) : at.count <= 32 ? run<32>(at) : run<64>(at);
    } else {
      at.count <= 64    ? run<64>(at)
      : at.count <= 96  ? run<96>(at)
      : at.count <= 128 ? run<128>(at)
      : at.count <= 160 ? run<160>(at)
      : at.count <= 192 ? run<192>(at)
                        : run<256>(at);
    }
  }

 private:
  template <int kColumns>
  __device__ void run(const TilePlace& at) {
    using namespace hopper;
    float sum[kColumns / 2] = {};  // else its registers would be taken from one tile to the next
    if constexpr (Tile::kFp8) {
      multiply_fp8<kColumns>(at, sum);
    } else {
      multiply<kColumns>(sum);
    }
    store<kColumns>(at, sum);
  }

  template <int kColumns>
  __device__ void multiply(float (&sum)[kColumns / 2]) {
    using namespace hopper;
    int last = 0;
    for (int chunk = 0; chunk < p_.chunks; chunk++) {
      barrier_wait(&full_[ring_.index], ring_.parity);
      const char* stage = stages_ + ring_.index * Tile::kStageBytes;
      const uint64_t rows = swizzled_operand(stage + group_ * 64 * 128);
      const uint64_t columns = swizzled_operand(stage + Tile::kWeightBytes);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; i++) Wgmma<kType, kColumns>::run(sum, next_k(rows, i), next_k(columns, i), true);
      wgmma_commit();
      wgmma_wait<1>();
      if (chunk > 0 && lane_ == 0) barrier_arrive(&empty_[last]);
      last = ring_.index;
      ring_.next();
    }
    wgmma_wait<0>();
    wgmma_hold(sum);
    if (lane_ == 0) barrier_arrive(&empty_[last]);
  }

  // FP8 weights go through registers. A lane's 4 bytes of a row are elements 4 t to 4 t + 3 of 16, where the
  // instruction takes 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: so x has its elements in another order (permuted_piece). A
  // chunk is a block of scales along k, its sum is multiplied by them.
  template <int kColumns>
  __device__ void multiply_fp8(const TilePlace& at, float (&sum)[kColumns / 2]) {
    using namespace hopper;
    const int strip = group_ * 4 + warp_, row = lane_ / 8 % 2 * 8 + lane_ % 8;  // this lane's row for ldmatrix
    const int first = at.row_tile * (Tile::kGated ? 64 : 128) + strip * (Tile::kGated ? 8 : 16);
    const float* low_scale = p_.scales.of(at.expert, min(first, p_.n - 1));
    const float* high_scale = p_.scales.of(at.expert, min(first, p_.n - 1) + p_.up_rows);
    // A stage's weights as operands of its 8 steps.
    const auto read = [&](uint32_t(&a)[8][4]) {
      const uint32_t from = shared_address(stages_ + ring_.index * Tile::kStageBytes) + (strip * 16 + row) * 128;
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        uint32_t words[4];  // rows g and g + 8 of step i, of step i + 1
        load_matrices(words, from + ((i + lane_ / 16 ^ row % 8) << 4));
#pragma unroll
        for (int j = 0; j < 4; j++) {
          a[i + j / 2][j % 2] = widen<T>(__byte_perm(words[j], 0, 0x1404));
          a[i + j / 2][j % 2 + 2] = widen<T>(__byte_perm(words[j], 0, 0x3424));
        }
      }
    };
    uint32_t a[8][4], next[8][4];
    barrier_wait(&full_[ring_.index], ring_.parity);
    read(a);
    for (int chunk = 0; chunk < p_.chunks; chunk++) {
      const float low = p_.scales.at(low_scale, chunk), high = p_.scales.at(high_scale, chunk);
      const int stage = ring_.index;
      float part[kColumns / 2] = {};
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const char* x = stages_ + stage * Tile::kStageBytes + Tile::kWeightBytes + i / 4 * Tile::kPartBytes;
        WgmmaRegisters<kType, kColumns, false>::run(part, a[i], next_k(swizzled_operand(x), i % 4), i > 0);
      }
      wgmma_commit();
      ring_.next();
      if (chunk + 1 < p_.chunks) {  // meanwhile the next stage's
        barrier_wait(&full_[ring_.index], ring_.parity);
        read(next);
      }
      wgmma_wait<0>();
      wgmma_hold(part);
      if (lane_ == 0) barrier_arrive(&empty_[stage]);
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          asm volatile("" ::"r"(a[i][j]));  // in use until here
          a[i][j] = next[i][j];
        }
#pragma unroll
      for (int i = 0; i < kColumns / 2; i++) sum[i] += part[i] * (i % 4 < 2 ? low : high);
    }
  }

  template <int kColumns>
  __device__ void store(const TilePlace& at, const float (&sum)[kColumns / 2]) {
#pragma unroll
    for (int first = 0; first < kColumns; first += Tile::kStaged) {
      if (first >= at.count) break;
      constexpr int kStaged = Tile::kStaged;
      hopper::named_barrier(1 + group_, 128);  // the pieces before have been read
#pragma unroll
      for (int c = 0; c < kStaged / 16; c++) {
        if (first + c * 16 >= kColumns) break;
        const float* d = sum + (first + c * 16) / 2;  // 16 pairs: two times 8 columns
        const int pair = c * 16 + lane_ / 8 % 2 * 8 + lane_ % 8;
        if constexpr (Tile::kGated) {
          hopper::store_transposed(staged(pair, warp_), gated(d), gated(d + 4));
        } else {
          hopper::store_transposed(staged(pair, 2 * warp_ + lane_ / 16), round_pair<T>(d[0], d[1]),
                                   round_pair<T>(d[4], d[5]), round_pair<T>(d[2], d[3]), round_pair<T>(d[6], d[7]));
        }
      }
      hopper::named_barrier(1 + group_, 128);
      const int count = min(kStaged, at.count - first);
      const int column = at.row_tile * Tile::kFeatures + group_ * (Tile::kFeatures / 2);
      for (int i = threadIdx.x % 128; i < count * Tile::kPieces; i += 128) {
        const int pair = i / Tile::kPieces, piece = i % Tile::kPieces, place = at.begin + first + pair;
        if (column + piece * 8 >= p_.n) continue;
        const int64_t row = p_.rows ? p_.rows[place] : place;
        uint4 value = load(staged(pair, p_.permuted ? piece & ~1 : piece));
        if (p_.permuted) value = permuted_piece(value, load(staged(pair, piece | 1)), piece);
        *reinterpret_cast<uint4*>(p_.out + (row * p_.out_step + column + piece * 8) * 2) = value;
      }
    }
  }

  __device__ static uint4 load(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
  }

  // Two pairs of silu(gate) * up of one feature.
  __device__ static uint32_t gated(const float* d) {
    const auto silu = [](float x) { return x / (1.f + __expf(-x)); };
    return round_pair<T>(silu(d[0]) * d[2], silu(d[1]) * d[3]);
  }
  // Where a piece of a pair's row is staged, so that neighbouring pairs meet in no bank.
  __device__ uint32_t staged(int pair, int piece) const {
    const int turned = Tile::kGated ? piece ^ pair / 2 % 4 : piece ^ pair % 8;
    return hopper::shared_address(staging_) + (pair * Tile::kPieces + turned) * 16;
  }

  const ManyParams& p_;
  const char* stages_;
  uint64_t *full_, *empty_;
  const int group_, warp_, lane_;
  char* staging_;
  Ring ring_;
};

template <class T, class Tile>
__global__ void __launch_bounds__(kManyThreads, 1)
    many_kernel(const __grid_constant__ hopper::TensorMap weight_map, const __grid_constant__ hopper::TensorMap x_map,
                const __grid_constant__ ManyParams p) {
  using namespace hopper;
  constexpr int kStages = Tile::kStages;
  extern __shared__ char unaligned[];
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ Schedule schedule;
  char* stages = unaligned + (-shared_address(unaligned) & 1023);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&weight_map);
    prefetch_tensor_map(&x_map);
    for (int i = 0; i < kStages; i++) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], 8);  // the consumer warps
    }
    barrier_init_fence();
  }
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x < 32) schedule.find(p, Tile::kMaxColumns);
  __syncthreads();
  const int tiles = schedule.first[p.named] * p.row_tiles;

  if (threadIdx.x < 128) {
    give_registers<40>();
    if (threadIdx.x != 0) return;
    Ring<kStages> ring;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const TilePlace at(schedule, p, tile);
      const int boxes = (at.count + Tile::kBox - 1) / Tile::kBox;
      for (int chunk = 0; chunk < p.chunks; chunk++, ring.next()) {
        barrier_wait(&empty[ring.index], ring.parity ^ 1);
        uint64_t* barrier = &full[ring.index];
        char* stage = stages + ring.index * Tile::kStageBytes;
        barrier_arrive_expect(barrier, Tile::kWeightBytes + Tile::kParts * boxes * Tile::kBox * 128);
        const int k = chunk * Tile::kChunk;
        if constexpr (Tile::kGated) {
          tma_load_4d(stage, &weight_map, barrier, k, 0, 0, at.expert * p.expert_rows + at.row_tile * 8);
        } else {
          tma_load_2d(stage, &weight_map, barrier, k, at.expert * p.expert_rows + at.row_tile * kTileRows);
        }
        for (int part = 0; part < Tile::kParts; part++)
          for (int box = 0; box < boxes; box++)
            tma_load_2d(stage + Tile::kWeightBytes + part * Tile::kPartBytes + box * Tile::kBox * 128, &x_map, barrier,
                        k + part * 64, at.begin + box * Tile::kBox);
      }
    }
  } else {
    take_registers<232>();
    ManyConsumer<T, Tile> self(p, stages, stages + kStages * Tile::kStageBytes, full, empty);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) self.run(TilePlace(schedule, p, tile));
  }
}

}  // namespace radix::experts
