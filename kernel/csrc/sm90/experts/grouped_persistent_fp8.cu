#include "sm90/experts/grouped_persistent.cuh"
#include "sm90/gemm/wgmma_persistent.cuh"

namespace radix::experts {
namespace {

// Weight rows as [k, 8, gate or up, units of 8 rows]: a box alternates between 8 gate rows and 8 up rows. The units run
// through all groups; at a group's end a box may take rows of what follows, whose results nobody stores.
sm90::TensorMap gated_map(const PersistentProduct& q, int columns) {
  const uint64_t row = q.k, units = q.n / 16;
  const sm90::TileShape shape = {4,
                                 {row, 8, 2, units * (2 * q.groups - 1)},
                                 {row, row * (q.n / 2), 8 * row},
                                 {128, 8, 2, static_cast<uint32_t>(columns / 16)}};
  return sm90::make_tensor_map(q.weight, CU_TENSOR_MAP_DATA_TYPE_UINT8, shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

template <int kColumns, gemm::Weights kWeights>
void launch(const PersistentProduct& q, gemm::Problem& dense) {
  using namespace gemm;
  constexpr bool kGated = kWeights == Weights::grouped_gated;
  using Tile = PersistentTile<kColumns>;
  PersistentParams p = params_of<PersistentParams>(dense);
  p.n_tiles = ceil_div(q.n, kColumns * kPersistentCluster) * kPersistentCluster;
  p.gated = kGated;
  p.block_w_matrix = int64_t{ceil_div(q.n, 128)} * p.block_w_step;
  sm90::LaunchShape shape;
  shape.grid = dim3(multiprocessors(q.device) / kPersistentCluster * kPersistentCluster);
  shape.threads = kPersistentThreads;
  shape.shared_bytes = Tile::kSharedBytes;
  shape.cluster = kPersistentCluster;
  dense.batch = q.groups;
  const sm90::TensorMap weight = kGated ? gated_map(q, kColumns) : weight_map(dense, kColumns);
  dense.batch = 1;
  if (kGated) dense.epilogue.gate = Gate::halves;
  sm90::launch_dependent(q.op, q.device, q.stream,
                         grouped_persistent_kernel<sm90::Operand::e4m3, bf16, Tile, Sums::blocks, kWeights>, shape,
                         token_map(dense, kPersistentTokens / kPersistentCluster), weight,
                         result_map(dense, kStoreBoxColumns), p, q.tiles);
}

// Cycles in tiles of so many weight rows, as gemm::persistent_cycles.
int64_t cycles(const PersistentProduct& q, int columns) {
  const int clusters = multiprocessors(q.device) / gemm::kPersistentCluster;
  const int tiles = q.expected * gemm::ceil_div(q.n, columns * gemm::kPersistentCluster);
  return int64_t{gemm::ceil_div(tiles, clusters)} *
         (gemm::ceil_div(q.k, 128) * (256 + 3 * columns) + 1500 + 10 * columns);
}

// The dense product that its matrices would be alone.
gemm::Problem dense_of(const PersistentProduct& q) {
  gemm::Problem dense = {};
  dense.op = q.op;
  dense.device = q.device;
  dense.stream = q.stream;
  dense.x = q.x;
  dense.weight = q.weight;
  dense.x_step = q.x_step;
  dense.weight_step = q.k;
  dense.weight_batch = int64_t{q.n} * q.k;
  dense.m = static_cast<int>(q.rows);
  dense.n = q.n;
  dense.k = q.k;
  dense.type = DType::f8e4m3;
  dense.out_type = DType::bf16;
  dense.block_x = q.x_scale;
  dense.block_x_step = q.x_scale_step;
  dense.block_x_unit = q.x_scale_unit;
  dense.block_w = q.w_scale;
  dense.block_w_step = gemm::ceil_div(q.k, 128);
  dense.epilogue.out = q.out;
  dense.epilogue.out_step = q.out_step;
  return dense;
}

}  // namespace

void grouped_persistent_fp8(const PersistentProduct& q) {
  using gemm::Weights;
  gemm::Problem dense = dense_of(q);
  if (q.gated) return launch<192, Weights::grouped_gated>(q, dense);
  cycles(q, 192) <= cycles(q, 128) ? launch<192, Weights::grouped>(q, dense) : launch<128, Weights::grouped>(q, dense);
}

}  // namespace radix::experts
