// Launches of grouped_swap_ab.
#pragma once

#include "sm90/experts/grouped_swap_ab_kernel.cuh"
#include "sm90/experts/order.cuh"

namespace radix::experts {

inline sm90::TensorMap matrix_map(const Problem& q, const void* data, const sm90::TileShape& shape, int item) {
  const auto type = item == 1               ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : q.type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return sm90::make_tensor_map(data, type, shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Rows of k elements of `item` bytes, `step` bytes apart: boxes of `box` rows.
inline sm90::TensorMap rows_map(const Problem& q, const void* data, int k, int64_t step, int64_t rows, int box,
                                int item) {
  const sm90::TileShape shape = {
      2, {uint64_t(k), uint64_t(rows)}, {sm90::map_stride(step, rows)}, {uint32_t(128 / item), uint32_t(box)}};
  return matrix_map(q, data, shape, item);
}

// w1 as [hidden, 8, gate or up, units of 8 rows]: a box alternates between 8 gate rows and 8 up rows. The units run
// through all experts; at an expert's end a box may take rows of what follows, whose results nobody stores.
inline sm90::TensorMap gated_map(const Problem& q, int item) {
  const uint64_t row = uint64_t(q.hidden) * item, units = uint64_t(q.inter) / 8;
  const sm90::TileShape shape = {4,
                                 {uint64_t(q.hidden), 8, 2, units * (2 * q.experts - 1)},
                                 {row, row * q.inter, 8 * row},
                                 {uint32_t(128 / item), 8, 2, kTileRows / 16}};
  return matrix_map(q, q.w1, shape, item);
}

// The scales of x's rows [chunks, step]: a box for the pairs of a tile.
inline sm90::TensorMap scales_map(const float* data, int chunks, int step, int box) {
  const sm90::TileShape shape = {2, {uint64_t(step), uint64_t(chunks)}, {uint64_t(step) * 4}, {uint32_t(box), 1}};
  return sm90::make_tensor_map(data, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, shape, CU_TENSOR_MAP_SWIZZLE_NONE);
}

template <class T, class Tile>
void launch_product(const Problem& q, const GroupedSwapAbParams& p, const sm90::TensorMap& weight,
                    const sm90::TensorMap& x, const sm90::TensorMap& scales) {
  sm90::LaunchShape shape;
  shape.grid = dim3(multiprocessors(q.device) / Tile::kCluster * Tile::kCluster);
  shape.threads = kGroupedSwapAbThreads;
  shape.shared_bytes = Tile::kSharedBytes;
  shape.cluster = Tile::kCluster;
  sm90::launch_dependent(q.op, q.device, q.stream, grouped_swap_ab_kernel<T, Tile>, shape, weight, x, scales, p);
}

template <class T, Format kFormat, int kMaxColumns, int kCluster = 1>
void launch_grouped_swap_ab(const Problem& q, const Scratch& s) {
  using Up = GroupedSwapAbTile<kFormat, true, kMaxColumns, kCluster>;
  using Down = GroupedSwapAbTile<kFormat, false, kMaxColumns, kCluster>;
  constexpr bool kFp8 = kFormat == Format::fp8;
  constexpr int kWeight = kFormat == Format::half ? 2 : 1, kX = kFp8 ? 1 : 2;  // bytes of an element
  const auto tiles = [](int n, int features, int cluster) {
    const int each = features * cluster;
    return (n + each - 1) / each;
  };
  GroupedSwapAbParams p = {};
  p.placed = gather_rows(q, s);
  p.begins = s.offsets;
  p.ends = s.offsets + 1;
  p.map = q.routing.map;
  p.named = q.routing.named;
  p.n = q.inter;
  p.row_tiles = tiles(q.inter, Up::kFeatures, Up::kCluster);
  p.chunks = tiles(q.hidden, Up::kChunk, 1);
  p.scales = scales_of(q, q.w1_scale, 2 * q.inter, q.hidden);
  p.up_rows = q.inter;
  p.expert_rows = 2 * q.inter / 8;
  p.out = s.act;
  p.out_step = q.inter;
  p.permuted = kFormat == Format::widened;
  p.out_scales = s.act_scales;
  p.scale_step = s.scale_step;
  sm90::TensorMap scales = {};
  if (kFp8) scales = scales_map(s.row_scales, p.chunks, s.scale_step, Up::kScaleBox);
  launch_product<T, Up>(q, p, gated_map(q, kWeight),
                        rows_map(q, s.rows, q.hidden, int64_t{q.hidden} * kX, q.pairs(), Up::kBox, kX), scales);

  p.placed = true;
  p.rows = s.sorted;
  p.n = q.hidden;
  p.row_tiles = tiles(q.hidden, Down::kFeatures, Down::kCluster);
  p.chunks = tiles(q.inter, Down::kChunk, 1);
  p.scales = scales_of(q, q.w2_scale, q.hidden, q.inter);
  p.up_rows = 0;
  p.expert_rows = q.hidden;
  p.out = s.rows;
  p.out_step = q.hidden;
  p.permuted = false;
  if (kFp8) scales = scales_map(s.act_scales, p.chunks, s.scale_step, Down::kScaleBox);
  launch_product<T, Down>(
      q, p, rows_map(q, q.w2, q.inter, int64_t{q.inter} * kWeight, int64_t{q.experts} * q.hidden, kTileRows, kWeight),
      rows_map(q, s.act, q.inter, int64_t{q.inter} * kX, q.pairs(), Down::kBox, kX), scales);
  combine(q, s.rows);
}

// Up to 32 pairs an expert in the mean the weights' bytes bound the product: small tiles, a deep ring. Pairs of blocks
// pay in FP8 where each expert has many: its tiles ask the L2 for twice the bytes an operation. (bf16 has the wide
// kernel for those.)
template <class T, Format kFormat>
void grouped_swap_ab(const Problem& q, const Scratch& s) {
  constexpr int kMost = kMostColumns<kFormat>;
  if (q.pairs() <= 32 * q.routing.named) return launch_grouped_swap_ab<T, kFormat, 64>(q, s);
  if constexpr (kFormat == Format::fp8 && !__is_same(T, bf16))
    if (q.pairs() > 512 * q.routing.named) return launch_grouped_swap_ab<T, kFormat, kMost, 2>(q, s);
  launch_grouped_swap_ab<T, kFormat, kMost>(q, s);
}

}  // namespace radix::experts
