// out[m, n] = x[m, k] * weight[n, k]^T in FP8 for many tokens, on wgmma. Bound by the tensor cores.
//
// Block: a producer warpgroup and two consumer warpgroups of 64 tokens each; persistent over tiles of 128 tokens x
// kColumns weight rows. A stage of the ring holds [128, 128] of x and [kColumns, 128] of the weight.
//
// Cluster: two blocks. Neighbours along n share the tokens; each loads half of them and multicasts it to both. Or, for
// a weight of few rows (kShareK), both have the same tile and half of k each, and exchange half of their sums at the
// end.
//
// Producer: one thread waits until a stage is empty in both blocks, then TMA. One warp copies the scales of a stage's
// blocks, or fetches scale and bias of a tile's columns while it is multiplied.
//
// Consumers: the tensor cores keep about 14 bits of a sum, so sums move to float32 registers: every 128 elements of k
// where blocks have scales, times these; else every 512, since adding and multiplying hinder each other.
//
// End of a tile: scales, bias, gate in registers; through swizzled shared memory; TMA store, which runs on while the
// next tile is multiplied.
#pragma once

#include "cuda/gemm/wide_tile.h"
#include "cuda/hopper/cluster.h"
#include "cuda/hopper/pdl.h"
#include "cuda/hopper/registers.h"
#include "cuda/hopper/tma.h"
#include "cuda/hopper/wgmma.h"

namespace radix::gemm {

template <class Out, int kColumns, bool kBlockScaled>
class WideConsumer {
 public:
  using Tile = WideTile<kColumns>;
  static constexpr int kDepth = kBlockScaled ? 1 : 4;  // chunks of k that the tensor cores add up

  __device__ explicit WideConsumer(const WideParams& p) : p_(p), group_(threadIdx.x / 128 - 1) {}

  __device__ int group() const { return group_; }

  __device__ void begin(const WidePlace& at) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; i++) sum_[i] = 0;
    split_ = 128 - at.n_tile * kColumns % 128;
  }

  // Starts on one stage; `more`: on top of the one before.
  __device__ void multiply(const char* stage, bool more) {
    using namespace hopper;
    const uint64_t tokens = swizzled_operand(stage + group_ * 64 * 128);
    const uint64_t weight = swizzled_operand(stage + Tile::kTokenBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
      Wgmma<Operand::e4m3, kColumns>::run(part_, next_k(tokens, i), next_k(weight, i), i > 0 || more);
    wgmma_commit();
  }
  // The scales of a stage's blocks: of this lane's two tokens, and of the rows before and after a border of 128.
  __device__ void load_scales(const float* scales) {
    x_[0] = scales[group_ * 64 + row()];
    x_[1] = scales[group_ * 64 + row() + 8];
    w_[0] = scales[kWideTokens];
    w_[1] = scales[kWideTokens + 1];
  }
  // What the tensor cores have added up, which is complete.
  __device__ void add() {
    // Borders of 128 rows lie at multiples of this within a tile.
    constexpr int kSegment = kColumns % 128 == 0 ? 128 : kColumns % 64 == 0 ? 64 : 32;
    hopper::wgmma_hold(part_);
    float scale[2] = {};
#pragma unroll
    for (int i = 0; i < kColumns / 2; i++) {
      if constexpr (kBlockScaled) {
        const int column = i / 4 * 8;
        if (i % 4 == 0 && column % kSegment == 0) {
          const float w = 128 % kColumns == 0 || column < split_ ? w_[0] : w_[1];
          scale[0] = x_[0] * w;
          scale[1] = x_[1] * w;
        }
        sum_[i] += part_[i] * scale[i % 4 / 2];
      } else {
        sum_[i] += part_[i];
      }
    }
  }

  // Sums of the block that has the other half of k: of half of the columns, which this one then keeps. All threads of
  // the cluster meet here.
  __device__ void exchange(char* shared, int rank) {
    using namespace hopper;
    constexpr int kKept = kColumns / 4;
    float4* to = reinterpret_cast<float4*>(shared) + threadIdx.x - 128;
#pragma unroll
    for (int i = 0; i < kKept; i += 4) {
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) v[j] = rank ? sum_[i + j] : sum_[kKept + i + j];
      to[i / 4 * 256] = make_float4(v[0], v[1], v[2], v[3]);
    }
    cluster_sync();
#pragma unroll
    for (int i = 0; i < kKept; i += 4) {
      const float4 other = load_remote(remote_address(to + i / 4 * 256, rank ^ 1));
      const float v[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
      for (int j = 0; j < 4; j++) sum_[i + j] = (rank ? sum_[kKept + i + j] : sum_[i + j]) + v[j];
    }
  }

  // Columns kFrom to kTo of the tile to `shared` [columns / 32][64 rows][64 bytes], swizzled. What lies outside of the
  // matrix is not stored. `columns`: scale and bias of each.
  template <int kFrom, int kTo>
  __device__ void write(const WidePlace& at, const float2* columns, char* shared) const {
    const int y = row();
    const bool gated = !kBlockScaled && p_.gated;
    float scales[2] = {1, 1};
    if constexpr (!kBlockScaled) {
#pragma unroll
      for (int half = 0; half < 2; half++) scales[half] = token_scale(p_.epilogue, min(token(at) + half * 8, p_.m - 1));
    }
    char* to = shared + y * 64 + threadIdx.x % 4 * 4;
#pragma unroll
    for (int i = kFrom / 8; i < kTo / 8; i++) {
      if (gated && i % 2) continue;
      const int piece = (i - kFrom / 8) / (gated ? 2 : 1);
      float v[4];
      finish_four(v, i, columns, scales);
      if (gated) {
        float up[4];
        finish_four(up, i | 1, columns, scales);
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = silu(v[j]) * up[j];
      }
#pragma unroll
      for (int half = 0; half < 2; half++)
        *reinterpret_cast<uint32_t*>(to + piece / 4 * 64 * 64 + half * 8 * 64 + (piece % 4 ^ y / 2 % 4) * 16) =
            round_pair<Out>(v[2 * half], v[2 * half + 1]);
    }
  }

 private:
  // First of this lane's two rows (the other is 8 below).
  __device__ int row() const { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
  __device__ int token(const WidePlace& at) const { return at.m_tile * kWideTokens + group_ * 64 + row(); }

  // Scales and bias of columns 8 i + 2 t, + 1 of both tokens.
  __device__ void finish_four(float (&v)[4], int i, const float2* columns, const float (&scales)[2]) const {
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = sum_[4 * i + j];
    if constexpr (!kBlockScaled) {
      const float4 c = *reinterpret_cast<const float4*>(columns + i * 8 + threadIdx.x % 4 * 2);
      v[0] = v[0] * (scales[0] * c.x) + c.y;
      v[1] = v[1] * (scales[0] * c.z) + c.w;
      v[2] = v[2] * (scales[1] * c.x) + c.y;
      v[3] = v[3] * (scales[1] * c.z) + c.w;
    }
  }

  const WideParams& p_;
  const int group_;
  float sum_[kColumns / 2], part_[kColumns / 2];
  float x_[2], w_[2];
  int split_;
};

// The scales of the blocks of a tile's stages, by one warp. Tokens and rows past the end take the scale of one that
// exists; nobody reads their sums.
template <int kColumns>
class WideScales {
 public:
  __device__ WideScales(const WideParams& p, const WidePlace& at, int first_chunk) : unit_(p.block_x_unit) {
    const int lane = threadIdx.x % 32, block = at.n_tile * kColumns / 128 + lane % 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = min(at.m_tile * kWideTokens + lane + 32 * i, p.m - 1);
      x_[i] = p.block_x + token * p.block_x_step + first_chunk * unit_;
    }
    w_ = p.block_w + min(block, (p.n - 1) / 128) * p.block_w_step + first_chunk;
  }
  // Those of the next chunk; every lane arrives at `full` when its copies are there.
  __device__ void copy(float* to, uint64_t* full) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      hopper::copy_async_4(to + lane + 32 * i, x_[i]);
      x_[i] += unit_;
    }
    if (lane < 2) hopper::copy_async_4(to + kWideTokens + lane, w_);
    w_++;
    hopper::copy_async_arrive(full);
  }

 private:
  const float *x_[4], *w_;
  int64_t unit_;
};

// Scale and bias of a tile's columns to shared memory, by one warp.
template <class Out, int kColumns>
__device__ void wide_columns(const WideParams& p, const WidePlace& at, float2* columns) {
  const Epilogue& e = p.epilogue;
  for (int i = threadIdx.x % 32; i < kColumns; i += 32) {
    const int column = at.n_tile * kColumns + i;
    const int row = p.gated ? min(column / 16 * 8 + column % 8, p.n / 2 - 1) * p.row_step + column / 8 % 2 * p.up_offset
                            : min(column, p.n - 1);
    columns[i] = make_float2(e.scale_w[row * e.scale_w_step], e.bias ? bias_of<Out>(e, row) : 0.f);
  }
}

template <class Out, int kColumns, bool kBlockScaled, bool kShareK>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_kernel(const __grid_constant__ hopper::TensorMap x_map, const __grid_constant__ hopper::TensorMap weight_map,
                const __grid_constant__ hopper::TensorMap out_map, const __grid_constant__ WideParams p) {
  using namespace hopper;
  using Tile = WideTile<kColumns>;
  constexpr int kStages = Tile::kStages, kReaders = kShareK ? 1 : kWideCluster;  // blocks that read a stage's tokens
  extern __shared__ char unaligned[];
  char* stages = unaligned + (-shared_address(unaligned) & 1023);
  char* results = stages + kStages * Tile::kStageBytes;
  char* scales = results + 2 * Tile::kOutBytes;
  float2* columns = reinterpret_cast<float2*>(scales);
  const auto scales_of = [&](int stage) { return reinterpret_cast<float*>(scales) + stage * Tile::kScales; };
  __shared__ uint64_t full[kStages], empty[kStages], columns_full, columns_empty;
  const int rank = cluster_rank();
  const int half = (p.chunks + 1) / 2, first_chunk = kShareK ? rank * half : 0;
  const int chunks = !kShareK ? p.chunks : rank == 0 ? half : p.chunks - half;
  const int first = blockIdx.x / kWideCluster, step = gridDim.x / kWideCluster;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      barrier_init(&full[i], kBlockScaled ? 33 : 1);  // the producer, and the warp that copies scales
      barrier_init(&empty[i], 8 * kReaders);          // their consumer warps
    }
    barrier_init(&columns_full, 32);
    barrier_init(&columns_empty, 8);
    barrier_init_fence();
  }
  cluster_sync();
  pdl_trigger();

  // Blocks that share k have one tile: all their threads meet once in the exchange.
  if (threadIdx.x < 128) {
    give_registers<40>();
    if (threadIdx.x == 0) {
      constexpr int kPart = kWideTokens / kReaders;
      const int part = kShareK ? 0 : rank * kPart;
      const auto load_weight = [&](const Ring<kStages>& to, const WidePlace& at, int chunk) {
        const int column = at.n_tile * kColumns;
        barrier_arrive_expect(&full[to.index], Tile::kStageBytes);
        tma_load_4d(stages + to.index * Tile::kStageBytes + Tile::kTokenBytes, &weight_map, &full[to.index],
                    (first_chunk + chunk) * 128, p.gated ? 0 : column, p.gated ? 0 : at.batch,
                    p.gated ? column / 16 : 0);
      };
      const auto load_tokens = [&](const Ring<kStages>& to, const WidePlace& at, int chunk) {
        char* stage = stages + to.index * Tile::kStageBytes;
        const int k = (first_chunk + chunk) * 128, y = at.m_tile * kWideTokens + part;
        if constexpr (kShareK) {
          tma_load_3d(stage, &x_map, &full[to.index], k, y, at.batch);
        } else {
          tma_multicast_3d(stage + part * 128, &x_map, &full[to.index], 3, k, y, at.batch);
        }
      };
      // A static weight may fill the ring while the kernel ahead still runs.
      int ahead = 0;
      if (p.static_weight) {
        const WidePlace at = wide_place<kShareK>(p, first, rank);
        for (Ring<kStages> ring; ahead < min(kStages, chunks); ahead++, ring.next()) load_weight(ring, at, ahead);
      }
      pdl_wait();
      Ring<kStages> ring;
      for (int tile = first; tile < p.tiles; tile += step) {
        const WidePlace at = wide_place<kShareK>(p, tile, rank);
        for (int chunk = 0; chunk < chunks; chunk++, ring.next()) {
          if (ahead > 0) {
            ahead--;
          } else {
            barrier_wait(&empty[ring.index], ring.parity ^ 1);
            load_weight(ring, at, chunk);
          }
          load_tokens(ring, at, chunk);
        }
      }
    } else if (threadIdx.x / 32 == 1) {
      pdl_wait();
      Ring<kStages> ring;
      uint32_t parity = 1;
      for (int tile = first; tile < p.tiles; tile += step, parity ^= 1) {
        const WidePlace at = wide_place<kShareK>(p, tile, rank);
        if constexpr (kBlockScaled) {
          WideScales<kColumns> from(p, at, first_chunk);
          for (int chunk = 0; chunk < chunks; chunk++, ring.next()) {
            barrier_wait(&empty[ring.index], ring.parity ^ 1);
            from.copy(scales_of(ring.index), &full[ring.index]);
          }
        } else {
          barrier_wait(&columns_empty, parity);
          wide_columns<Out, kColumns>(p, at, columns);
          barrier_arrive(&columns_full);
        }
      }
    }
    if constexpr (kShareK) {
      __syncwarp();
      cluster_sync();
    }
  } else {
    take_registers<232>();
    pdl_wait();
    WideConsumer<Out, kColumns, kBlockScaled> self(p);
    // Blocks that share k exchange sums where others put their results; the stages are free by then.
    char* result = (kShareK ? stages : results) + self.group() * Tile::kOutBytes;
    const int lane = threadIdx.x % 32;
    const bool leader = threadIdx.x % 128 == 0;
    Ring<kStages> ring, behind;  // the stage to read, the stage to release
    uint32_t columns_parity = 0;
    const auto release = [&] {
      if constexpr (kShareK) {
        if (lane == 0) barrier_arrive(&empty[behind.index]);
      } else {
        if (lane < kWideCluster) barrier_arrive_remote(&empty[behind.index], lane);
      }
      behind.next();
    };
    for (int tile = first; tile < p.tiles; tile += step) {
      const WidePlace at = wide_place<kShareK>(p, tile, rank);
      self.begin(at);
      constexpr int kDepth = WideConsumer<Out, kColumns, kBlockScaled>::kDepth;
      for (int chunk = 0; chunk < chunks; chunk += kDepth) {
        const int count = min(kDepth, chunks - chunk);
        for (int i = 0; i < count; i++) {
          barrier_wait(&full[ring.index], ring.parity);
          if constexpr (kBlockScaled) self.load_scales(scales_of(ring.index));
          self.multiply(stages + ring.index * Tile::kStageBytes, kDepth > 1 && i > 0);
          ring.next();
          if (kDepth > 1 && i > 0) {
            wgmma_wait<1>();
            release();
          }
        }
        wgmma_wait<0>();
        release();
        self.add();
      }
      if constexpr (kShareK) self.exchange(results, rank);
      if constexpr (!kBlockScaled) {
        barrier_wait(&columns_full, columns_parity);
        columns_parity ^= 1;
      }
      const int gates = p.gated ? 2 : 1, kept = kShareK ? rank * (kColumns / 2) : 0;
      const auto store = [&](auto from) {
        constexpr int kFrom = decltype(from)::value, kTo = kShareK ? kColumns / 2 : kFrom + Tile::kRound;
        if (leader) tma_store_wait_read<0>();
        named_barrier(1 + self.group(), 128);
        self.template write<kFrom, kTo>(at, columns + kept, result);
        fence_async_shared();
        named_barrier(1 + self.group(), 128);
        if (leader) {
          const int x = (at.n_tile * kColumns + kept + kFrom) / gates, y = at.m_tile * kWideTokens + self.group() * 64;
          if (y < p.m)
            for (int box = 0; box < (kTo - kFrom) / gates; box += kWideBox)
              tma_store_3d(&out_map, result + box * 64 * 2, x + box, y, at.batch);
          tma_store_commit();
        }
      };
      store(std::integral_constant<int, 0>());
      if constexpr (Tile::kRound < kColumns) store(std::integral_constant<int, Tile::kRound>());
      if constexpr (2 * Tile::kRound < kColumns) store(std::integral_constant<int, 2 * Tile::kRound>());
      if constexpr (!kBlockScaled) {
        __syncwarp();
        if (lane == 0) barrier_arrive(&columns_empty);
      }
    }
    if (leader) tma_store_wait();
  }
  // A block's shared memory stays until its neighbour has sent and counted its last.
  __syncwarp();
  cluster_sync_relaxed();
}

}  // namespace radix::gemm
