// FP8 products with many tokens: the tile that wastes the least, blocks in pairs.
#include <algorithm>

#include "cuda/gemm/launch.h"
#include "cuda/gemm/maps.h"
#include "cuda/gemm/wide_kernel.h"

namespace radix::gemm {
namespace {

template <class Out, int kBlocks, int kCluster, bool kBlockScaled>
void launch_wide(const Problem& q) {
  using Tile = WideTile<kBlocks, kCluster>;
  WideParams p = {};
  p.m = q.m;
  p.n = q.n;
  p.m_tiles = (q.m + Tile::kRows - 1) / Tile::kRows;
  p.n_tiles = (q.n + kWideColumns * kCluster - 1) / (kWideColumns * kCluster) * kCluster;
  p.chunks = (q.k + 127) / 128;
  p.tiles = q.batch * p.m_tiles * (p.n_tiles / kCluster);
  p.gated = q.gated();
  p.up_offset = q.epilogue.gate == Gate::halves ? q.n / 2 : 1;
  p.row_step = q.epilogue.gate == Gate::interleaved ? 2 : 1;
  p.block_x = q.block_x;
  p.block_w = q.block_w;
  p.block_x_step = q.block_x_step;
  p.block_x_unit = q.block_x_unit;
  p.block_w_step = q.block_w_step;
  p.epilogue = q.epilogue;
  hopper::LaunchShape shape;
  shape.grid = dim3(std::min(multiprocessors(q.device) / kCluster, p.tiles) * kCluster);
  shape.threads = kWideThreads;
  shape.shared_bytes = Tile::kSharedBytes;
  shape.cluster = kCluster;
  hopper::launch_dependent(q.op, q.device, q.stream, wide_kernel<Out, kBlocks, kCluster, kBlockScaled>, shape,
                           token_map(q, Tile::kRows / kCluster), weight_map(q, kWideColumns), result_map(q), p);
}

// Tiles of 256 tokens pay where there are many and a tile takes long.
template <class Out, bool kBlockScaled>
void run(const Problem& q) {
  const bool large = q.m >= 1024 && q.k >= 8192;
  large ? launch_wide<Out, 2, 2, kBlockScaled>(q) : launch_wide<Out, 1, 2, kBlockScaled>(q);
}

template <class Out>
void run(const Problem& q) {
  q.block_w ? run<Out, true>(q) : run<Out, false>(q);
}

}  // namespace

void wide_fp8(const Problem& problem) {
  problem.out_type == DType::bf16 ? run<bf16>(problem) : run<f16>(problem);
}

}  // namespace radix::gemm
