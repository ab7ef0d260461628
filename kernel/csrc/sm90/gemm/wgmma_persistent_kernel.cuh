// out[m, n] = x[m, k] * weight[n, k]^T for many tokens, on wgmma. Bound by the tensor cores, and by power.
//
// Block: a producer warpgroup and two consumer warpgroups of 64 tokens each, or twice 64; persistent over tiles of 128
// or 256 tokens x kColumns weight rows. A stage of the ring holds [tokens, 128] of x and [kColumns, 128] of the weight.
//
// Cluster: two blocks (Share). Neighbours share the tokens or the weight's rows; each loads half of them and multicasts
// it to both. Or, for a weight of few rows, both have the same tile and half of k each, and exchange half of their
// sums at the end (split k).
//
// Producer: one thread waits until a stage is empty in both blocks, then TMA. One warp copies the scales of a stage's
// blocks, or fetches scale and bias of a tile's columns while it is multiplied.
//
// Consumers (wgmma_persistent_consumer.cuh): the tensor cores keep about 14 bits of a sum, so sums move to float32
// registers every 128 elements of k, times the scales of blocks where there are any; or, where the caller allows, never
// (Sums). INT8 sums are int32 and exact: never.
//
// Epilogue: scales, bias, gate in registers; through swizzled shared memory; TMA store, which runs on while the
// next tile is multiplied. In ping-pong the next tile's first products run while this one's last results are made.
//
// Shared memory (PersistentShared), at most 227 KiB:
//
//   | ring of stages   | kStages x kStageBytes    | x [kTokens, 128 bytes], weight [kColumns, 128 bytes]           |
//   | results          | 2 x kBuffers x kOutBytes | of each consumer: [64 rows, kRound columns], swizzled          |
//   | scales           | kScaleBytes              | of the stages' blocks; or scale and bias of the tile's columns |
//   | full, empty, ... | kBarrierBytes            | barriers of the stages and of the columns                      |
#pragma once

#include "sm90/common/cp_async.cuh"
#include "sm90/common/pdl.cuh"
#include "sm90/common/setmaxnreg.cuh"
#include "sm90/gemm/wgmma_persistent_consumer.cuh"

namespace radix::gemm {

// The scales of the blocks of a tile's stages, by one warp. Tokens and rows past the end take the scale of one that
// exists; nobody reads their sums.
template <class Tile, Weights kWeights = Weights::dense>
class BlockScaleLoader {
 public:
  __device__ BlockScaleLoader(const PersistentParams& p, const TileCoord& at, int first_chunk) : unit_(p.block_x_unit) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRuns; i++) {
      const int token = min(at.row + lane + 32 * i, at.end - 1);
      x_[i] = p.block_x + token * p.block_x_step + first_chunk * unit_;
    }
    const int half = kPaired ? p.n / 2 : p.n;  // gate rows, then as many up rows
    const int first = at.n_tile * (kPaired ? Tile::kColumns / 2 : Tile::kColumns) / 128;
    const int block = min(first + lane % 2, (half - 1) / 128) + (kPaired ? lane / 2 % 2 * (half / 128) : 0);
    w_ = p.block_w + at.matrix * p.block_w_matrix + block * p.block_w_step + first_chunk;
  }
  // Those of the next chunk; every lane arrives at `full` when its copies are there.
  __device__ void copy(float* to, uint64_t* full) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRuns; i++) {
      sm90::cp_async_4(to + lane + 32 * i, x_[i]);
      x_[i] += unit_;
    }
    if (lane < (kPaired ? 4 : 2)) sm90::cp_async_4(to + Tile::kTokens + lane, w_);
    w_++;
    sm90::cp_async_mbarrier_arrive(full);
  }

 private:
  static constexpr bool kPaired = kWeights == Weights::grouped_gated;
  static constexpr int kRuns = Tile::kTokens / 32;
  static_assert(Tile::kTokens % 32 == 0, "a lane copies the scale of each 32nd token");
  const float *x_[kRuns], *w_;
  int64_t unit_;
};

// Scale and bias of a tile's columns to shared memory, by one warp.
template <class Out, int kColumns, bool kScaled>
__device__ void load_column_epilogue(const PersistentParams& p, const TileCoord& at, float2* columns) {
  const Epilogue& e = p.epilogue;
  for (int i = threadIdx.x % 32; i < kColumns; i += 32) {
    const int column = at.n_tile * kColumns + i;
    const int row = p.gated ? min(column / 16 * 8 + column % 8, p.n / 2 - 1) * p.row_step + column / 8 % 2 * p.up_offset
                            : min(column, p.n - 1);
    columns[i] = make_float2(kScaled ? e.scale_w[row * e.scale_w_step] : 1.f, e.bias ? bias_of<Out>(e, row) : 0.f);
  }
}

// What the producer's thread loads: stages of tiles, in the order in which consumers read them. `last_map`: x in boxes
// of last_box_rows() for the last tile; groups of rows follow each other in x, and have whole boxes.
template <sm90::Operand kType, class Tile, Share kShare, Weights kWeights = Weights::dense>
class PersistentProducer {
 public:
  __device__ PersistentProducer(const PersistentParams& p, const PersistentShared<Tile>& shared,
                                const sm90::TensorMap& x_map, const sm90::TensorMap& last_map,
                                const sm90::TensorMap& weight_map, int first_chunk)
      : p_(p), s_(shared), x_map_(x_map), last_map_(last_map), weight_map_(weight_map), first_chunk_(first_chunk) {}

  __device__ void run(int first, int step, int rank, int chunks) {
    using namespace sm90;
    // A static weight may fill the ring while the kernel ahead still runs.
    int ahead = 0;
    if (p_.static_weight) {
      const TileCoord at = tile_coord<kShare, Tile>(p_, first, rank);
      const uint32_t bytes = kWeightBytes + token_box(at, rank).bytes;
      for (; ahead < min(Tile::kStages, chunks); ahead++) load_weight(ahead, at, rank, ahead, bytes);
    }
    pdl_wait();
    for (int tile = first; tile < p_.tiles; tile += step)
      load(tile_coord<kShare, Tile>(p_, tile, rank), rank, chunks, ahead);
  }
  // The stages of a tile, `ahead` of whose weights are on their way.
  __device__ void load(const TileCoord& at, int rank, int chunks, int& ahead) {
    const TokenBox box = token_box(at, rank);
    for (int chunk = 0; chunk < chunks; chunk++, ring_.next()) {
      if (ahead > 0) {
        ahead--;
      } else {
        sm90::barrier_wait(&s_.empty[ring_.index], ring_.parity ^ 1);
        load_weight(ring_.index, at, rank, chunk, kWeightBytes + box.bytes);
      }
      if (box.map) load_tokens(ring_.index, at, box, chunk);
    }
  }

 private:
  static constexpr uint16_t kBoth = 3;
  static constexpr int kAlongN = tiles_along_n(kShare), kAlongM = tiles_along_m(kShare);
  static constexpr int kChunk = 128 / sm90::operand_bytes(kType);  // elements in the 128 bytes of a stage's row
  static constexpr uint32_t kWeightBytes = Tile::kColumns * 128;   // of a stage, from both blocks where they share it

  // What this block asks for of a tile's rows of x.
  struct TokenBox {
    const sm90::TensorMap* map;  // null: the tile lies behind the last row, beside one that does not
    int first;                   // row of the tile
    uint32_t bytes;              // of x that a stage of either block receives, from both where they share the tokens
  };
  // Rows of a stage that no box fills keep what they held, NaNs too: a row of x is in one row of sums alone, and those
  // of rows that do not exist are not stored.
  __device__ TokenBox token_box(const TileCoord& at, int rank) const {
    const int rows = at.end - at.row;
    if (kWeights != Weights::dense || rows >= Tile::kTokens)
      return {&x_map_, kAlongN > 1 ? rank * (Tile::kTokens / 2) : 0, Tile::kTokenBytes};
    if (rows <= 0) return {nullptr, 0, 0};
    return {&last_map_, last_box_row(kShare, rows, rank), uint32_t(kAlongN * last_box_rows(kShare, rows) * 128)};
  }

  // `bytes`: of the whole stage.
  __device__ void load_weight(int stage, const TileCoord& at, int rank, int chunk, uint32_t bytes) const {
    const int first_row = kAlongM > 1 ? rank * (Tile::kColumns / 2) : 0, row = at.n_tile * Tile::kColumns + first_row;
    const int k = (first_chunk_ + chunk) * kChunk;
    const int y = p_.gated ? 0 : row, z = p_.gated ? 0 : at.matrix,
              w = p_.gated ? at.matrix * (p_.n / 8) + row / 16 : 0;
    char* to = s_.weight(stage) + first_row * 128;
    uint64_t* full = &s_.full[stage];
    sm90::barrier_arrive_expect(full, bytes);
    if constexpr (kAlongM > 1) {
      sm90::tma_multicast_4d(to, &weight_map_, full, kBoth, k, y, z, w);
    } else {
      sm90::tma_load_4d(to, &weight_map_, full, k, y, z, w);
    }
  }
  __device__ void load_tokens(int stage, const TileCoord& at, const TokenBox& box, int chunk) const {
    const int k = (first_chunk_ + chunk) * kChunk, y = at.row + box.first;
    char* to = s_.tokens(stage) + box.first * 128;
    if constexpr (kAlongN > 1) {
      sm90::tma_multicast_3d(to, box.map, &s_.full[stage], kBoth, k, y, at.batch);
    } else {
      sm90::tma_load_3d(to, box.map, &s_.full[stage], k, y, at.batch);
    }
  }

  const PersistentParams& p_;
  const PersistentShared<Tile> s_;
  const sm90::TensorMap &x_map_, &last_map_, &weight_map_;
  const int first_chunk_;
  sm90::Ring<Tile::kStages> ring_;
};

template <sm90::Operand kType, class Out, class Tile, Sums kSums, Share kShare>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    wgmma_persistent_kernel(const __grid_constant__ sm90::TensorMap x_map,
                            const __grid_constant__ sm90::TensorMap last_map,
                            const __grid_constant__ sm90::TensorMap weight_map,
                            const __grid_constant__ sm90::TensorMap out_map,
                            const __grid_constant__ ParamsOf<kType, PersistentParams> p) {
  using namespace sm90;
  constexpr bool kBlockScaled = kSums == Sums::blocks, kShareK = kShare == Share::k;
  extern __shared__ __align__(1024) char begin[];  // without static shared memory it begins at a multiple of 1024
  const PersistentShared<Tile> shared(begin);
  const int rank = cluster_rank();
  const int half = (p.chunks + 1) / 2, first_chunk = kShareK ? rank * half : 0;
  int chunks = !kShareK ? p.chunks : rank == 0 ? half : p.chunks - half;
  asm volatile("" : "+r"(chunks));  // a register, not a load in every round
  const int first = blockIdx.x / kPersistentCluster, step = gridDim.x / kPersistentCluster;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; i++) {
      barrier_init(&shared.full[i], kBlockScaled ? 33 : 1);  // the producer, and the warp of the scales
      barrier_init(&shared.empty[i], kWarpArrivals * 8 * (kShareK ? 1 : kPersistentCluster));  // the warps that read it
    }
    barrier_init(shared.columns_full, 32);
    barrier_init(shared.columns_empty, kWarpArrivals * 8);
    barrier_init_fence();
  }
  cluster_sync();
  pdl_trigger();

  // Blocks that share k have one tile: all their threads synchronize once, in exchange_split_k().
  if (threadIdx.x < 128) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) {
      PersistentProducer<kType, Tile, kShare> self(p, shared, x_map, last_map, weight_map, first_chunk);
      self.run(first, step, rank, chunks);
    } else if (threadIdx.x / 32 == 1) {
      pdl_wait();
      Ring<Tile::kStages> ring;
      uint32_t parity = 1;
      for (int tile = first; tile < p.tiles; tile += step, parity ^= 1) {
        const TileCoord at = tile_coord<kShare, Tile>(p, tile, rank);
        if constexpr (kBlockScaled) {
          BlockScaleLoader<Tile> from(p, at, first_chunk);
          for (int chunk = 0; chunk < chunks; chunk++, ring.next()) {
            barrier_wait(&shared.empty[ring.index], ring.parity ^ 1);
            from.copy(shared.block_scales(ring.index), &shared.full[ring.index]);
          }
        } else {
          barrier_wait(shared.columns_empty, parity);
          load_column_epilogue<Out, Tile::kColumns, operand_bytes(kType) == 1>(p, at, shared.columns());
          barrier_arrive(shared.columns_full);
        }
      }
    }
    if constexpr (kShareK) {
      __syncwarp();
      cluster_sync();
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    pdl_wait();
    using Consumer = PersistentConsumer<kType, Out, Tile, kSums, kShare>;
    Consumer self(p, shared);
    if constexpr (Consumer::kPingPong) self.start();
    uint32_t parity = 0;
    for (int tile = first; tile < p.tiles; tile += step, parity ^= 1) {
      const TileCoord at = tile_coord<kShare, Tile>(p, tile, rank);
      self.mainloop(at, chunks);
      if constexpr (kShareK) self.exchange_split_k(rank);
      if constexpr (!kBlockScaled) barrier_wait(shared.columns_full, parity);
      self.begin_epilogue(out_map, at);
      if constexpr (Consumer::kPingPong) self.start(tile + step < p.tiles);
      self.epilogue(out_map, at, kShareK ? rank * (Tile::kColumns / 2) : 0);
      if constexpr (!kBlockScaled) {
        __syncwarp();
        barrier_arrive_warp(shared.columns_empty);
      }
    }
    self.finish();
  }
  // A block's shared memory stays until its neighbour has sent and counted its last.
  __syncwarp();
  cluster_sync_relaxed();
}

}  // namespace radix::gemm
