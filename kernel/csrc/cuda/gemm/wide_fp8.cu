// FP8 products with many tokens: the tile that takes the least time, by a model of it.
#include <algorithm>

#include "cuda/gemm/launch.h"
#include "cuda/gemm/maps.h"
#include "cuda/gemm/wide_kernel.h"

namespace radix::gemm {
namespace {

int clusters(const Problem& q) {
  return multiprocessors(q.device) / kWideCluster;
}
int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

// Cycles for m tokens in tiles of so many weight rows, a fit to timings of an H200: 128 elements of k take 230 and 5 a
// row, beginning and end of a tile 2,500, with an exchange of sums 3,500.
int64_t cycles(const Problem& q, int m, int columns, bool share_k) {
  const int tiles = q.batch * ceil_div(m, kWideTokens) * ceil_div(q.n, columns * (share_k ? 1 : kWideCluster));
  const int chunks = ceil_div(ceil_div(q.k, 128), share_k ? 2 : 1);
  const int64_t rounds = ceil_div(tiles, clusters(q));
  return rounds * (chunks * (5 * columns + 230) + (share_k ? 3500 : 2500));
}

template <class Out, int kColumns, bool kBlockScaled, bool kShareK>
void launch_wide(const Problem& q) {
  using Tile = WideTile<kColumns>;
  const int width = kShareK ? 1 : kWideCluster;
  WideParams p = {};
  p.m = q.m;
  p.n = q.n;
  p.m_tiles = ceil_div(q.m, kWideTokens);
  p.n_tiles = ceil_div(q.n, kColumns * width) * width;
  p.chunks = ceil_div(q.k, 128);
  p.tiles = q.batch * p.m_tiles * (p.n_tiles / width);
  p.static_weight = q.static_weight;
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
  shape.grid = dim3((kShareK ? p.tiles : std::min(clusters(q), p.tiles)) * kWideCluster);
  shape.threads = kWideThreads;
  shape.shared_bytes = Tile::kSharedBytes;
  shape.cluster = kWideCluster;
  hopper::launch_dependent(q.op, q.device, q.stream, wide_kernel<Out, kColumns, kBlockScaled, kShareK>, shape,
                           token_map(q, kWideTokens / width), weight_map(q, kColumns), result_map(q, kWideBox), p);
}

// The tile does not change bits; whether k is shared does, so that for one tile of tokens it follows from n and k
// alone.
template <class Out, bool kBlockScaled>
void run(const Problem& q) {
  const bool share_k = q.m <= kWideTokens && q.k >= 1024 && !q.gated();
  int best = 192;
  for (const int columns : {160, 128, 96, 64}) {
    const bool whole_boxes = !q.gated() || columns / 2 % kWideBox == 0;
    if (whole_boxes && cycles(q, q.m, columns, false) < cycles(q, q.m, best, false)) best = columns;
  }
  if (share_k && cycles(q, kWideTokens, 64, true) < cycles(q, kWideTokens, best, false))
    return launch_wide<Out, 64, kBlockScaled, true>(q);
  switch (best) {
    case 64: return launch_wide<Out, 64, kBlockScaled, false>(q);
    case 96: return launch_wide<Out, 96, kBlockScaled, false>(q);
    case 128: return launch_wide<Out, 128, kBlockScaled, false>(q);
    case 160: return launch_wide<Out, 160, kBlockScaled, false>(q);
    default: return launch_wide<Out, 192, kBlockScaled, false>(q);
  }
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
