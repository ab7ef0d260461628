// Fused experts for sorted pairs, on wgmma: result[place, f] = w[e][f, :] @ x[place, :], the places of expert e being
// begins[e] .. ends[e] - 1. Weights are wgmma's 64-row operand and pairs its columns, whose number a tile
// chooses (16 .. kMaxColumns): few pairs waste little, many fill the tensor cores.
//
//   block: persistent, one a multiprocessor; tiles of 128 weight rows by up to kMaxColumns pairs of one expert; those
//   of the same weight rows follow each other, so that the weights come from memory once.
//   cluster: where there are many pairs two blocks have the same pairs and neighbouring weight rows; each loads half of
//   x and multicasts it to both (a tile alone would ask more of the L2 than it gives).
//   producer (a thread): TMA of [128 rows, 128 bytes] of the weights and the pairs' rows into a ring of stages, which
//   runs on from tile to tile. Its first weights are on their way before the kernel ahead has ended.
//   consumers (two warpgroups): 64 rows each; one product in flight while the next stage is awaited.
//   epilogue: silu(gate) * up where gated (the tensor map alternates between 8 gate and 8 up rows, so that a lane
//   has both), transposed through shared memory, rows of the result in pieces of 16 bytes.
//
// Shared memory (kSharedBytes and static arrays):
//
//   | ring of stages | kStages x kStageBytes  | weights, then kParts x pairs: rows of 128 bytes          |
//   | scales         | kStages x kScaleBytes  | Format::fp8: of the stages' pairs                        |
//   | staging        | 1 or 2 x kStagingBytes | results of 64 pairs a consumer; FP8: of all pairs        |
//   | full, empty    | kStages each           | barriers (static)                                        |
//   | schedule       | 12 KiB                 | of each expert: first and last pair, first tile (static) |
#pragma once

#include "sm90/common/cluster.cuh"
#include "sm90/common/convert.cuh"
#include "sm90/common/ldmatrix.cuh"
#include "sm90/common/pdl.cuh"
#include "sm90/common/setmaxnreg.cuh"
#include "sm90/common/wgmma_registers.cuh"
#include "sm90/experts/grouped_swap_ab_producer.cuh"

namespace radix::experts {

using sm90::round_pair;

template <class T, class Tile>
class GroupedSwapAbConsumer {
 public:
  using Ring = sm90::Ring<Tile::kStages>;
  static constexpr sm90::Operand kType = sm90::kOperand<T>;

  // stages: then the scales of their pairs, then where results are staged.
  __device__ GroupedSwapAbConsumer(const GroupedSwapAbParams& p, char* stages, uint64_t* full, uint64_t* empty)
      : p_(p),
        stages_(stages),
        scales_(reinterpret_cast<const float*>(stages + Tile::kStages * Tile::kStageBytes)),
        full_(full),
        empty_(empty),
        group_(threadIdx.x / 128 - 1),
        warp_(threadIdx.x % 128 / 32),
        lane_(threadIdx.x % 32),
        staging_(stages + Tile::kStages * (Tile::kStageBytes + Tile::kScaleBytes) +
                 (Tile::kQuantizes ? 0 : group_ * Tile::kStagingBytes)) {}

  __device__ void run(const TilePlace& at) {
    const int columns = Tile::columns(at.count);
    if constexpr (Tile::kMaxColumns <= 64) {
      columns == 16 ? run<16>(at) : columns == 32 ? run<32>(at) : run<64>(at);
    } else {
      if (columns == 64) return run<64>(at);
      if (columns == 96) return run<96>(at);
      if (columns == 128) return run<128>(at);
      if constexpr (Tile::kMaxColumns > 128)
        if (columns == 144) return run<144>(at);
      if constexpr (Tile::kMaxColumns > 144)
        if (columns == 192) return run<192>(at);
      if constexpr (Tile::kMaxColumns > 192)
        if (columns == 256) return run<256>(at);
    }
  }

 private:
  template <int kColumns>
  __device__ void run(const TilePlace& at) {
#pragma unroll 1
    for (int i = 0; i < Tile::kRuns; i++) {
      float sum[kColumns / 2] = {};  // else its registers would be kept from one tile to the next
      if constexpr (Tile::kFormat == Format::half) {
        multiply<kColumns>(sum);
      } else if constexpr (Tile::kFormat == Format::widened) {
        multiply_widened<kColumns>(at, sum);
      } else {
        multiply_fp8<kColumns>(at, sum);
      }
      if constexpr (Tile::kQuantizes) {
        stage<kColumns>(i, at.count, sum);
      } else if constexpr (Tile::kGated) {
        store_gated<kColumns>(at, sum);
      } else {
        store<kColumns>(at, sum);
      }
    }
    if constexpr (Tile::kQuantizes) store_quantized(at);
  }

  // This warp has read a stage.
  __device__ void release(int stage) { sm90::barrier_arrive_warp(&empty_[stage], Tile::kCluster); }

  template <int kColumns>
  __device__ void multiply(float (&sum)[kColumns / 2]) {
    using namespace sm90;
    int last = 0;
    for (int chunk = 0; chunk < p_.chunks; chunk++) {
      barrier_wait(&full_[ring_.index], ring_.parity);
      start<kType, kColumns>(sum, true);
      wgmma_wait<1>();
      if (chunk > 0) release(last);
      last = ring_.index;
      ring_.next();
    }
    wgmma_wait<0>();
    wgmma_hold(sum);
    release(last);
  }

  // The products of a stage whose operands both lie in shared memory, on top of `sum` or not.
  template <sm90::Operand kOperand, int kColumns>
  __device__ void start(float (&sum)[kColumns / 2], bool more) {
    using namespace sm90;
    const char* stage = stages_ + ring_.index * Tile::kStageBytes;
    const uint64_t rows = swizzled_operand(stage + group_ * 64 * 128);
    const uint64_t columns = swizzled_operand(stage + Tile::kWeightBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) Wgmma<kOperand, kColumns>::run(sum, next_k(rows, i), next_k(columns, i), more || i > 0);
    wgmma_commit();
  }

  // A chunk is a block of scales along k, of the weights and of x: its sum is multiplied by both.
  template <int kColumns>
  __device__ void multiply_fp8(const TilePlace& at, float (&sum)[kColumns / 2]) {
    using namespace sm90;
    const int first = min(at.row_tile * Tile::kFeatures, p_.n - 1);
    WeightScales scales(p_.scales.of(at.expert, first), p_.scales.of(at.expert, first + p_.up_rows), p_.chunks, lane_);
    for (int chunk = 0; chunk < p_.chunks; chunk++) {
      float part[kColumns / 2];
      barrier_wait(&full_[ring_.index], ring_.parity);
      start<Operand::e4m3, kColumns>(part, false);
      scales.find(chunk);
      const float* of_x = scales_ + ring_.index * (Tile::kScaleBytes / 4) + at.begin % 4 + lane_ % 4 * 2;
      wgmma_wait<0>();
      wgmma_hold(part);
#pragma unroll
      for (int i = 0; i < kColumns / 2; i += 4) {
        const float x[2] = {of_x[2 * i], of_x[2 * i + 1]};
        sum[i] += part[i] * (x[0] * scales.low);
        sum[i + 1] += part[i + 1] * (x[1] * scales.low);
        sum[i + 2] += part[i + 2] * (x[0] * scales.high);
        sum[i + 3] += part[i + 3] * (x[1] * scales.high);
      }
      __syncwarp();
      release(ring_.index);
      ring_.next();
    }
  }

  // Of the weights of a chunk, the gate's rows and the up rows; a lane holds those of one of 32 chunks.
  struct WeightScales {
    const float *low_from, *high_from;
    int chunks, lane;
    float low_ahead = 0, high_ahead = 0, low = 0, high = 0;

    __device__ WeightScales(const float* low_from, const float* high_from, int chunks, int lane)
        : low_from(low_from), high_from(high_from), chunks(chunks), lane(lane) {}

    __device__ void find(int chunk) {
      if (chunk % 32 == 0) {
        const int mine = min(chunk + lane, chunks - 1);
        low_ahead = low_from[mine];
        high_ahead = Tile::kGated ? high_from[mine] : low_ahead;
      }
      low = __shfl_sync(~0u, low_ahead, chunk % 32);
      high = Tile::kGated ? __shfl_sync(~0u, high_ahead, chunk % 32) : low;
    }
  };

  // FP8 weights go through registers. A lane's 4 bytes of a row are elements 4 t to 4 t + 3 of 16, where the
  // instruction takes 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: so x has its elements in another order (permuted_piece). A
  // chunk is a block of scales along k, its sum is multiplied by them.
  template <int kColumns>
  __device__ void multiply_widened(const TilePlace& at, float (&sum)[kColumns / 2]) {
    using namespace sm90;
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
        ldmatrix_x4(words, from + ((i + lane_ / 16 ^ row % 8) << 4));
#pragma unroll
        for (int j = 0; j < 4; j++) {
          a[i + j / 2][j % 2] = sm90::widen_odd_e4m3<T>(__byte_perm(words[j], 0, 0x1404));
          a[i + j / 2][j % 2 + 2] = sm90::widen_odd_e4m3<T>(__byte_perm(words[j], 0, 0x3424));
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
      release(stage);
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

  // Of a gated product: 32 features of a pair from the four warps.
  template <int kColumns>
  __device__ void store_gated(const TilePlace& at, const float (&sum)[kColumns / 2]) {
    constexpr int kStaged = Tile::kStaged;
#pragma unroll
    for (int first = 0; first < kColumns; first += kStaged) {
      if (first >= at.count) break;
      sm90::named_barrier(1 + group_, 128);  // the pieces before have been read
#pragma unroll
      for (int c = 0; c < kStaged / 16; c++) {
        if (first + c * 16 >= kColumns) break;
        const float* d = sum + (first + c * 16) / 2;  // 16 pairs: two times 8 columns
        sm90::stmatrix_x2_trans(staged(c * 16 + lane_ % 16, warp_), gated(d), gated(d + 4));
      }
      sm90::named_barrier(1 + group_, 128);
      const int count = min(kStaged, at.count - first);
      const int column = at.row_tile * Tile::kFeatures + group_ * (Tile::kFeatures / 2);
      for (int i = threadIdx.x % 128; i < count * Tile::kPieces; i += 128) {
        const int pair = i / Tile::kPieces, piece = i % Tile::kPieces;
        if (column + piece * 8 >= p_.n) continue;
        uint4 value = load(staged(pair, p_.permuted ? piece & ~1 : piece));
        if (p_.permuted) value = permuted_piece(value, load(staged(pair, piece | 1)), piece);
        const int64_t place = at.begin + first + pair;
        *reinterpret_cast<uint4*>(p_.out + (place * p_.out_step + column + piece * 8) * 2) = value;
      }
    }
  }

  // A warp's own 16 features: a sector of the pair's row. No warp waits for another.
  template <int kColumns>
  __device__ void store(const TilePlace& at, const float (&sum)[kColumns / 2]) {
    const uint32_t from = sm90::shared_address(staging_) + warp_ * Tile::kStaged * 32;
    const auto staged = [&](int pair, int piece) { return from + pair * 32 + (piece ^ pair / 4 % 2) * 16; };
    const int piece = lane_ % 2, column = at.row_tile * kTileRows + (group_ * 4 + warp_) * 16 + piece * 8;
    int row[kColumns / 16];
#pragma unroll
    for (int i = 0; i < kColumns / 16; i++) {
      const int pair = i * 16 + lane_ / 2;
      row[i] = pair < at.count && column < p_.n ? p_.rows ? p_.rows[at.begin + pair] : at.begin + pair : -1;
    }
#pragma unroll
    for (int first = 0; first < kColumns; first += Tile::kStaged) {
      if (first >= at.count) break;
      __syncwarp();  // the pieces before have been read
#pragma unroll
      for (int c = 0; c < Tile::kStaged / 16; c++) {
        if (first + c * 16 >= kColumns) break;
        const float* d = sum + (first + c * 16) / 2;  // 16 pairs: two times 8 columns
        sm90::stmatrix_x4_trans(staged(c * 16 + lane_ % 16, lane_ / 16), round_pair<T>(d[0], d[1]),
                                round_pair<T>(d[4], d[5]), round_pair<T>(d[2], d[3]), round_pair<T>(d[6], d[7]));
      }
      __syncwarp();
#pragma unroll
      for (int i = first / 16; i < (first + Tile::kStaged) / 16 && i < kColumns / 16; i++) {
        if (row[i] < 0) continue;
        char* to = p_.out + (row[i] * p_.out_step + column) * 2;
        *reinterpret_cast<uint4*>(to) = load(staged(i * 16 - first + lane_ / 2, piece));
      }
    }
  }

  // One run's features of all pairs, rounded; both warpgroups stage beside each other.
  template <int kColumns>
  __device__ void stage(int run, int count, const float (&sum)[kColumns / 2]) {
    if (run == 0) sm90::named_barrier(1, 256);  // the tile before has been read
#pragma unroll
    for (int c = 0; c < kColumns / 16; c++) {
      if (c * 16 >= count) break;
      const float* d = sum + c * 8;
      sm90::stmatrix_x2_trans(staged(c * 16 + lane_ % 16, run * 8 + group_ * 4 + warp_), gated(d), gated(d + 4));
    }
  }

  // The 128 features of each pair in FP8, by 8 lanes.
  __device__ void store_quantized(const TilePlace& at) {
    sm90::named_barrier(1, 256);
    const int column = at.row_tile * Tile::kFeatures;
    if (column >= p_.n) return;
    for (int i = threadIdx.x - 128; i - lane_ < at.count * 8; i += 256) {
      const int pair = min(i / 8, at.count - 1), piece = i % 8;
      float v[16];
      unpack(load(staged(pair, piece)), v);
      unpack(load(staged(pair, piece + 8)), v + 8);
      float largest = 0;
#pragma unroll
      for (int j = 0; j < 16; j++) largest = fmaxf(largest, fabsf(v[j]));
#pragma unroll
      for (int mask = 4; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
      const QuantScale scale(largest);
      if (i >= at.count * 8) continue;
      const int64_t place = at.begin + pair;
      char* to = p_.out + place * p_.out_step + column + piece * 8;
      *reinterpret_cast<uint2*>(to) = scale.quantized(v);
      *reinterpret_cast<uint2*>(to + 64) = scale.quantized(v + 8);
      if (piece == 0) p_.out_scales[int64_t{at.row_tile} * p_.scale_step + place] = scale.value;
    }
  }

  // Eight T of 16 bytes.
  __device__ static void unpack(const uint4& piece, float* v) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      T pair[2];
      memcpy(pair, &words[i], 4);
      v[2 * i] = gpu::to_float(pair[0]);
      v[2 * i + 1] = gpu::to_float(pair[1]);
    }
  }

  __device__ static uint4 load(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
  }

  // Two pairs of silu(gate) * up of one feature.
  __device__ static uint32_t gated(const float* d) {
    const auto silu = [](float x) { return __fdividef(x, 1.f + __expf(-x)); };
    return round_pair<T>(silu(d[0]) * d[2], silu(d[1]) * d[3]);
  }
  // Where a piece of a pair's row is staged, so that neighbouring pairs meet in no bank.
  __device__ uint32_t staged(int pair, int piece) const {
    const int swizzled = Tile::kQuantizes ? piece ^ pair % 8 : piece ^ pair / 2 % 4;
    return sm90::shared_address(staging_) + (pair * Tile::kPieces + swizzled) * 16;
  }

  const GroupedSwapAbParams& p_;
  const char* stages_;
  const float* scales_;
  uint64_t *full_, *empty_;
  const int group_, warp_, lane_;
  char* staging_;
  Ring ring_;
};

// scale_map: of x's scales, where it has some.
template <class T, class Tile>
__global__ void __launch_bounds__(kGroupedSwapAbThreads, 1)
    grouped_swap_ab_kernel(const __grid_constant__ sm90::TensorMap weight_map,
                           const __grid_constant__ sm90::TensorMap x_map,
                           const __grid_constant__ sm90::TensorMap scale_map,
                           const __grid_constant__ GroupedSwapAbParams p) {
  using namespace sm90;
  constexpr int kStages = Tile::kStages, kCluster = Tile::kCluster;
  extern __shared__ char unaligned[];
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ Schedule schedule;
  static_assert(shared_fits(Tile::kSharedBytes + sizeof(full) + sizeof(empty) + sizeof(schedule)));
  char* stages = unaligned + (-shared_address(unaligned) & 1023);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&weight_map);
    prefetch_tensor_map(&x_map);
    for (int i = 0; i < kStages; i++) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kWarpArrivals * 8 * kCluster);  // the consumer warps
    }
    barrier_init_fence();
  }
  if (!p.placed) pdl_wait();
  if (threadIdx.x < 32) schedule.find(p, Tile::kMaxColumns);
  if constexpr (kCluster > 1) cluster_sync();
  __syncthreads();
  const int tiles = schedule.first[p.named] * p.row_tiles, rank = kCluster > 1 ? cluster_rank() : 0;
  const int first = blockIdx.x / kCluster, width = gridDim.x / kCluster;
  const auto place = [&](int tile) { return TilePlace::find<Tile>(schedule, p, tile, rank); };

  if (threadIdx.x < 128) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) {
      GroupedSwapAbProducer<Tile> self(p, stages, full, rank);
      int ahead = 0;
      if (first < tiles) {
        self.begin(place(first));
        for (Ring<kStages> ring; ahead < min(kStages, p.chunks); ahead++, ring.next())
          self.load_weights(ring, 0, ahead, &weight_map);
      }
      pdl_wait();
      pdl_trigger();
      Ring<kStages> ring;
      for (int tile = first; tile < tiles; tile += width) {
        self.begin(place(tile));
        for (int run = 0; run < Tile::kRuns; run++) {
          for (int chunk = 0; chunk < p.chunks; chunk++, ring.next()) {
            if (ahead > 0) {
              ahead--;
            } else {
              barrier_wait(&empty[ring.index], ring.parity ^ 1);
              self.load_weights(ring, run, chunk, &weight_map);
            }
            self.load_pairs(ring, chunk, &x_map, &scale_map);
          }
        }
      }
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    pdl_wait();
    GroupedSwapAbConsumer<T, Tile> self(p, stages, full, empty);
    for (int tile = first; tile < tiles; tile += width) self.run(place(tile));
  }
  // A block's shared memory stays until its neighbour has sent and counted its last.
  if constexpr (kCluster > 1) {
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace radix::experts
