// out[m, n] = x[m, k] * weight[n, k]^T for more tokens than mixed_mma takes, and a packed weight (layout.cuh), on
// wgmma.
//
//   block: persistent, one a multiprocessor; tiles of 2 x 64 weight rows by up to kMaxColumns tokens; those of the same
//   weight rows follow each other, so that the weight comes from memory once.
//   producer (a thread, mixed_wgmma_producer.cuh): bulk copies of codes, scales and zero points, TMA of x, into a ring
//   of stages that runs on from tile to tile.
//   consumers (two warpgroups, mixed_wgmma_mainloop.cuh): 64 rows each; gate halves: 64 gate rows and their up rows.
//   epilogue: the sums of 32 tokens at a time through shared memory, so that a thread has 8 neighbouring results of a
//   token (gemm/epilogue.cuh).
//
// Shared memory (kSharedBytes and static arrays):
//
//   | ring of stages | kStages x kStageBytes | x: 2 parts of kMaxColumns x 128 bytes (64 of k, swizzled) |
//   |                |                       | codes: of each warpgroup 2 tiles of 64 x 64               |
//   |                |                       | scales, zero points: of each warpgroup, groups x 64 rows  |
//   | sums           | kSumBytes             | of 32 tokens, 128 rows each                               |
//   | full, empty    | kStages each          | barriers (static)                                         |
#pragma once

#include "sm90/common/setmaxnreg.cuh"
#include "sm90/gemm/epilogue.cuh"
#include "sm90/linear/mixed_wgmma_mainloop.cuh"
#include "sm90/linear/mixed_wgmma_producer.cuh"

namespace radix::linear {

struct MixedWgmmaParams {
  MixedWeights weight;
  gemm::Epilogue epilogue;
  int m, columns;                      // columns of the result
  int row_tiles, token_tiles, tokens;  // tokens of a tile
};

constexpr int kStagedTokens = 32, kStagedStep = 2 * kTileRows + 4;  // floats from a token to the next: no bank twice
constexpr int kSumBytes = kStagedTokens * kStagedStep * 4;

template <class T, Code kCode, int kGroup, int kMaxColumns>
struct MixedWgmmaTile : MixedPipeline<T, kCode, kGroup, kMaxColumns, kSumBytes> {
  static constexpr int kSharedBytes =
      MixedWgmmaTile::kStages * MixedWgmmaTile::kStageBytes + kSumBytes + MixedWgmmaTile::kAlignment;
};

// Both warpgroups of a tile, together.
template <class T>
class MixedWgmmaEpilogue {
 public:
  __device__ MixedWgmmaEpilogue(const MixedWgmmaParams& p, char* sums)
      : p_(p), sums_(reinterpret_cast<float*>(sums)), gate_(p.epilogue.gate) {}

  template <int kColumns>
  __device__ void store(const MixedPlace& at, const float (&sum)[kColumns / 2]) const {
    const int gated = gate_ != gemm::Gate::none, pieces = gated ? 8 : 16;
    const int first_column = gated && gate_ == gemm::Gate::interleaved ? at.row / 2 : at.row;
#pragma unroll
    for (int first = 0; first < kColumns; first += kStagedTokens) {
      const int count = min(kStagedTokens, at.x_count - first);
      if (count <= 0) break;
      sm90::named_barrier(1, 256);  // what was staged has been read
#pragma unroll
      for (int c = 0; c < kStagedTokens / 8; c++) stage(c * 8, sum + first / 2 + c * 4);
      sm90::named_barrier(1, 256);
      for (int i = threadIdx.x - 128; i < count * pieces; i += 256) {
        const int token = i / pieces, piece = i % pieces, column = first_column + piece * 8;
        if (column < p_.columns) finish(token, piece, at.x_row + first + token, column);
      }
    }
  }

 private:
  // 8 tokens from the accumulators' layout.
  __device__ void stage(int token, const float* d) const {
    const int lane = threadIdx.x % 32, row = (threadIdx.x / 32 - 4) * 16 + lane / 4;
    float* to = sums_ + (token + lane % 4 * 2) * kStagedStep + row;
    to[0] = d[0];
    to[kStagedStep] = d[1];
    to[8] = d[2];
    to[kStagedStep + 8] = d[3];
  }

  __device__ void finish(int staged, int piece, int token, int column) const {
    const gemm::Epilogue& e = p_.epilogue;
    const float* from = sums_ + staged * kStagedStep;
    const int count = min(8, p_.columns - column);
    float v[8], up[8];
    if (gate_ == gemm::Gate::none) {
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = from[piece * 8 + j];
      gemm::finish_eight<T>(e, v, token, column, 1, count);
    } else {
      const bool halves = gate_ == gemm::Gate::halves;
      const int step = halves ? 1 : 2;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        v[j] = from[(piece * 8 + j) * step];
        up[j] = from[(piece * 8 + j) * step + (halves ? kTileRows : 1)];
      }
      gemm::finish_eight<T>(e, v, token, column * step, step, count);
      gemm::finish_eight<T>(e, up, token, column * step + (halves ? p_.columns : 1), step, count);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = gemm::silu(v[j]) * up[j];
    }
    gemm::store_eight<T>(e, v, token, column, count);
  }

  const MixedWgmmaParams& p_;
  float* sums_;
  const gemm::Gate gate_;
};

template <class Tile>
__global__ void __launch_bounds__(kMixedThreads, 1)
    mixed_wgmma_kernel(const __grid_constant__ sm90::TensorMap x_map, const __grid_constant__ MixedWgmmaParams p) {
  using namespace sm90;
  using T = typename Tile::T;
  extern __shared__ char unaligned[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages];
  static_assert(shared_fits(Tile::kSharedBytes + sizeof(full) + sizeof(empty)));
  char* stages = unaligned + (-shared_address(unaligned) & (Tile::kAlignment - 1));
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&x_map);
    init_mixed_barriers<Tile>(full, empty);
  }
  __syncthreads();
  const int tiles = p.row_tiles * p.token_tiles;
  const int features = p.epilogue.gate == gemm::Gate::halves ? kTileRows : 2 * kTileRows;
  const auto place = [&](int tile) {
    const int token = tile % p.token_tiles * p.tokens;
    return MixedPlace{0, tile / p.token_tiles * features, token, min(p.tokens, p.m - token)};
  };

  if (threadIdx.x < 128) {
    setmaxnreg_dec<kMixedProducerRegisters>();
    if (threadIdx.x == 0) {
      MixedProducer<Tile> producer(p.weight, stages, full, empty);
      producer.run(blockIdx.x, tiles, gridDim.x, &x_map, place);
    }
  } else {
    setmaxnreg_inc<kMixedConsumerRegisters>();
    pdl_wait();
    MixedMainloop<Tile> products(p.weight, stages, full, empty);
    const MixedWgmmaEpilogue<T> epilogue(p, stages + Tile::kStages * Tile::kStageBytes);
    const auto run = [&](auto columns) {
      constexpr int kColumns = decltype(columns)::value;
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float sum[kColumns / 2] = {};
        products.template multiply<kColumns>(sum);
        epilogue.template store<kColumns>(place(tile), sum);
      }
    };
    if constexpr (Tile::kMaxColumns > 64)
      if (p.tokens <= 96) return run(std::integral_constant<int, 96>());
    run(std::integral_constant<int, Tile::kMaxColumns>());
  }
}

}  // namespace radix::linear
