// out[m, n] = x[m, k] * weight[n, k]^T in FP8 for many tokens, on wgmma. Bound by the tensor cores.
//
//   block: a producer warpgroup and two consumer warpgroups; persistent over output tiles of kRows tokens x 128 weight
//   rows. A stage holds [kRows, 128] of x and [128, 128] of the weight.
//   cluster of 2: neighbours along n share the tokens; each loads half of them and multicasts it to both.
//   producer (one thread): waits until a stage is empty in both blocks, then TMA.
//   consumers: kBlocks times 64 tokens each. The tensor cores keep about 14 bits of a sum, so every 128 elements of k
//   their sums move to float32 registers, times the scales of the blocks where there are any; meanwhile the other
//   warpgroup has the tensor cores.
//   end of a tile: scales, bias, gate in registers; through swizzled shared memory; TMA store, which runs on while the
//   next tile is multiplied.
//
// Tiles follow each other along m, so that the blocks that run together share the weight in L2.
#pragma once

#include "cuda/gemm/epilogue.h"
#include "cuda/hopper/cluster.h"
#include "cuda/hopper/pdl.h"
#include "cuda/hopper/registers.h"
#include "cuda/hopper/tma.h"
#include "cuda/hopper/wgmma.h"

namespace radix::gemm {

constexpr int kWideColumns = 128;  // weight rows of a tile
constexpr int kWideThreads = 384;

struct WideParams {
  int m, n, m_tiles, n_tiles, chunks;  // n: weight rows; n_tiles: a multiple of the cluster; a batch is as many again
  int tiles;                           // of the clusters: batch * m_tiles * n_tiles / cluster
  bool gated;                          // the weight's map interleaves 8 gate rows and 8 up rows (not block-scaled)
  int up_offset, row_step;             // as NarrowParams
  const float* block_x;                // scales [m, chunks], or null
  const float* block_w;                // [weight rows / 128, chunks]
  int64_t block_x_step, block_x_unit, block_w_step;
  Epilogue epilogue;
};

template <int kBlocks, int kCluster>
struct WideTile {
  static constexpr int kRows = 128 * kBlocks;
  static constexpr int kTokenBytes = kRows * 128, kWeightBytes = kWideColumns * 128;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes;
  static constexpr int kStages = kBlocks == 2 ? 4 : 6;
  static constexpr int kOutBytes = 64 * kWideColumns * 2;  // of a warpgroup: 64 rows
  static constexpr int kSharedBytes = kStages * kStageBytes + 2 * kOutBytes + 1024;
};

struct WidePlace {
  int m_tile, n_tile, batch;
};
template <int kCluster>
__device__ inline WidePlace wide_place(const WideParams& p, int tile, int rank) {
  const int rest = tile / p.m_tiles, pairs = p.n_tiles / kCluster;
  return {tile % p.m_tiles, rest % pairs * kCluster + rank, rest / pairs};
}

template <class Out, int kBlocks, int kCluster, bool kBlockScaled>
class WideConsumer {
 public:
  using Tile = WideTile<kBlocks, kCluster>;
  static constexpr int kSums = kWideColumns / 2;
  float sum[kBlocks][kSums];

  __device__ explicit WideConsumer(const WideParams& p)
      : p_(p), group_(threadIdx.x / 128 - 1), g_(threadIdx.x % 32 / 4), t_(threadIdx.x % 4) {}

  // First of this lane's two rows (the other is 8 below) of block b, as a token.
  __device__ int token(const WidePlace& at, int b) const {
    return at.m_tile * Tile::kRows + (group_ * kBlocks + b) * 64 + threadIdx.x % 128 / 32 * 16 + g_;
  }
  __device__ int weight_row(int column, int up) const {
    return p_.gated ? column * p_.row_step + up * p_.up_offset : column;
  }

  __device__ void begin(const WidePlace& at) {
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int i = 0; i < kSums; i++) sum[b][i] = 0;
    if constexpr (kBlockScaled) {
      // Tokens past the end take the scale of one that exists; nobody reads their sums.
      const int first = min(token(at, 0), p_.m - 1);
      x_scale_ = p_.block_x + first * p_.block_x_step;
#pragma unroll
      for (int i = 1; i < 2 * kBlocks; i++)
        x_offset_[i] = static_cast<int>((min(token(at, i / 2) + i % 2 * 8, p_.m - 1) - first) * p_.block_x_step);
      w_scale_ = p_.block_w + at.n_tile * p_.block_w_step;  // a tile is a block wide
    }
  }

  // The scales of the next chunk.
  __device__ void load_scales() {
    if constexpr (kBlockScaled) {
      w_ = *w_scale_;
      x_[0] = *x_scale_;
#pragma unroll
      for (int i = 1; i < 2 * kBlocks; i++) x_[i] = x_scale_[x_offset_[i]];
      w_scale_++;
      x_scale_ += p_.block_x_unit;
    }
  }

  // One stage. `release` tells the producers that this warp has read it.
  template <class Release>
  __device__ void multiply(const char* tokens, const char* weight, const Release& release) {
    using namespace hopper;
    const uint64_t columns = swizzled_operand(weight);
    float part[kSums];
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      const uint64_t rows = swizzled_operand(tokens + (group_ * kBlocks + b) * 64 * 128);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; i++)
        Wgmma<Operand::e4m3, kWideColumns>::run(part, next_k(rows, i), next_k(columns, i), i > 0);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_hold(part);
      if (b == kBlocks - 1) release();
      if constexpr (kBlockScaled) {
        const float s[2] = {x_[2 * b] * w_, x_[2 * b + 1] * w_};
#pragma unroll
        for (int i = 0; i < kSums; i++) sum[b][i] += part[i] * s[i % 4 / 2];
      } else {
#pragma unroll
        for (int i = 0; i < kSums; i++) sum[b][i] += part[i];
      }
    }
  }

  // Block b of the tile to `shared` [columns / 64][64 rows][128 bytes], swizzled. What lies outside of the matrix is
  // clamped on reading, and TMA does not store it.
  __device__ void write(const WidePlace& at, int b, char* shared) const {
    const int y = threadIdx.x % 128 / 32 * 16 + g_;  // and 8 below
    const bool gated = !kBlockScaled && p_.gated;
    const int first = at.n_tile * kWideColumns / (gated ? 2 : 1) + 2 * t_;
    float scales[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
      scales[half] = kBlockScaled ? 1.f : token_scale(p_.epilogue, min(token(at, b) + half * 8, p_.m - 1));
    char* to = shared + y * 128 + t_ * 4;
#pragma unroll
    for (int i = 0; i < kWideColumns / 8; i++) {
      if (gated && i % 2) continue;
      const int piece = gated ? i / 2 : i;
      float v[4];
      finish_four(v, &sum[b][4 * i], first + piece * 8, 0, scales);
      if (gated) {
        float up[4];
        finish_four(up, &sum[b][4 * (i | 1)], first + piece * 8, 1, scales);
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = silu(v[j]) * up[j];
      }
#pragma unroll
      for (int half = 0; half < 2; half++)
        *reinterpret_cast<uint32_t*>(to + piece / 8 * 64 * 128 + half * 8 * 128 + (piece % 8 ^ y % 8) * 16) =
            round_pair<Out>(v[2 * half], v[2 * half + 1]);
    }
  }

  __device__ int group() const { return group_; }

 private:
  // Scales and bias of columns c, c + 1 of tokens g and g + 8.
  __device__ void finish_four(float (&v)[4], const float* sums, int column, int up, const float (&scales)[2]) const {
    const Epilogue& e = p_.epilogue;
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = sums[j];
    if constexpr (!kBlockScaled) {
      const int last = (p_.gated ? p_.n / 2 : p_.n) - 1;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int row = weight_row(min(column + j, last), up);
        const float scale = e.scale_w[row * e.scale_w_step], bias = e.bias ? bias_of<Out>(e, row) : 0.f;
        v[j] = v[j] * (scales[0] * scale) + bias;
        v[2 + j] = v[2 + j] * (scales[1] * scale) + bias;
      }
    }
  }

  const WideParams& p_;
  const int group_, g_, t_;
  const float *x_scale_, *w_scale_;
  int x_offset_[2 * kBlocks];  // from the first row's scale to the others'
  float x_[2 * kBlocks], w_;
};

template <class Out, int kBlocks, int kCluster, bool kBlockScaled>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_kernel(const __grid_constant__ hopper::TensorMap x_map, const __grid_constant__ hopper::TensorMap weight_map,
                const __grid_constant__ hopper::TensorMap out_map, const __grid_constant__ WideParams p) {
  using namespace hopper;
  using Tile = WideTile<kBlocks, kCluster>;
  constexpr int kStages = Tile::kStages;
  extern __shared__ char unaligned[];
  char* stages = unaligned + (-shared_address(unaligned) & 1023);
  char* results = stages + kStages * Tile::kStageBytes;
  __shared__ uint64_t full[kStages], empty[kStages];
  const int rank = kCluster > 1 ? cluster_rank() : 0;
  const int first = blockIdx.x / kCluster, step = gridDim.x / kCluster;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], 8 * kCluster);  // the consumer warps of the cluster
    }
    barrier_init_fence();
  }
  if constexpr (kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  pdl_wait();
  pdl_trigger();

  if (threadIdx.x < 128) {
    give_registers<40>();
    if (threadIdx.x == 0) {
      Ring<kStages> ring;
      constexpr int kPart = Tile::kRows / kCluster;
      for (int tile = first; tile < p.tiles; tile += step) {
        const WidePlace at = wide_place<kCluster>(p, tile, rank);
        for (int chunk = 0; chunk < p.chunks; chunk++) {
          barrier_wait(&empty[ring.index], ring.parity ^ 1);
          char* stage = stages + ring.index * Tile::kStageBytes;
          uint64_t* barrier = &full[ring.index];
          barrier_arrive_expect(barrier, Tile::kStageBytes);
          const int y = at.m_tile * Tile::kRows + rank * kPart;
          if constexpr (kCluster > 1) {
            tma_multicast_3d(stage + rank * kPart * 128, &x_map, barrier, 3, chunk * 128, y, at.batch);
          } else {
            tma_load_3d(stage, &x_map, barrier, chunk * 128, y, at.batch);
          }
          const int column = at.n_tile * kWideColumns;
          tma_load_4d(stage + Tile::kTokenBytes, &weight_map, barrier, chunk * 128, p.gated ? 0 : column,
                      p.gated ? 0 : at.batch, p.gated ? column / 16 : 0);
          ring.next();
        }
      }
    }
  } else {
    take_registers<232>();
    WideConsumer<Out, kBlocks, kCluster, kBlockScaled> self(p);
    char* result = results + self.group() * Tile::kOutBytes;
    Ring<kStages> ring;
    const auto release = [&] {
      const int lane = threadIdx.x % 32;
      if constexpr (kCluster > 1) {
        if (lane < kCluster) barrier_arrive_remote(&empty[ring.index], lane);
      } else {
        if (lane == 0) barrier_arrive(&empty[ring.index]);
      }
    };
    for (int tile = first; tile < p.tiles; tile += step) {
      self.begin(wide_place<kCluster>(p, tile, rank));
      for (int chunk = 0; chunk < p.chunks; chunk++) {
        self.load_scales();
        barrier_wait(&full[ring.index], ring.parity);
        const char* stage = stages + ring.index * Tile::kStageBytes;
        self.multiply(stage, stage + Tile::kTokenBytes, release);
        ring.next();
      }
      const WidePlace at = wide_place<kCluster>(p, tile, rank);
#pragma unroll
      for (int b = 0; b < kBlocks; b++) {
        const bool leader = threadIdx.x % 128 == 0;
        if (leader) tma_store_wait_read<0>();
        named_barrier(1 + self.group(), 128);
        self.write(at, b, result);
        fence_async_shared();
        named_barrier(1 + self.group(), 128);
        if (leader) {
          const int y = at.m_tile * Tile::kRows + (self.group() * kBlocks + b) * 64;
          const int x = at.n_tile * kWideColumns / (p.gated ? 2 : 1);
          if (y < p.m)
            for (int box = 0; box < (p.gated ? 1 : 2); box++)
              tma_store_3d(&out_map, result + box * 64 * 128, x + box * 64, y, at.batch);
          tma_store_commit();
        }
      }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait();
  }
  // A block's shared memory stays until its neighbour has sent and counted its last.
  if constexpr (kCluster > 1) {
    __syncwarp();
    cluster_sync_relaxed();
  }
}

}  // namespace radix::gemm
