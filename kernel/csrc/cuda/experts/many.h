// Launches of the path for sorted pairs.
#pragma once

#include "cuda/experts/many_kernel.h"
#include "cuda/experts/order.h"

namespace radix::experts {

inline hopper::TensorMap matrix_map(const Problem& q, const void* data, const hopper::TileShape& shape, int item) {
  const auto type = item == 1               ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : q.type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return hopper::make_tensor_map(data, type, shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Rows of k elements of `item` bytes that follow each other: boxes of `box` rows.
inline hopper::TensorMap rows_map(const Problem& q, const void* data, int k, int64_t rows, int box, int item) {
  const hopper::TileShape shape = {
      2, {uint64_t(k), uint64_t(rows)}, {uint64_t(k) * item}, {uint32_t(128 / item), uint32_t(box)}};
  return matrix_map(q, data, shape, item);
}

// w1 as [hidden, 8, gate or up, units of 8 rows]: a box alternates between 8 gate rows and 8 up rows. The units run
// through all experts; at an expert's end a box may take rows of what follows, whose results nobody stores.
inline hopper::TensorMap gated_map(const Problem& q, int item) {
  const uint64_t row = uint64_t(q.hidden) * item, units = uint64_t(q.inter) / 8;
  const hopper::TileShape shape = {4,
                                   {uint64_t(q.hidden), 8, 2, units * (2 * q.experts - 1)},
                                   {row, row * q.inter, 8 * row},
                                   {uint32_t(128 / item), 8, 2, kTileRows / 16}};
  return matrix_map(q, q.w1, shape, item);
}

template <class T, bool kFp8, int kMaxColumns>
void launch_many(const Problem& q, const Scratch& s) {
  using Up = ManyTile<true, kFp8, kMaxColumns>;
  using Down = ManyTile<false, kFp8, kMaxColumns>;
  constexpr int kItem = kFp8 ? 1 : 2;  // bytes of a weight's element
  sort_pairs(q, s.sorted, s.offsets);
  gather_rows(q, s.sorted, s.offsets, s.rows);
  ManyParams p = {};
  p.offsets = s.offsets;
  p.map = q.routing.map;
  p.named = q.routing.named;
  p.n = q.inter;
  p.row_tiles = (q.inter + Up::kFeatures - 1) / Up::kFeatures;
  p.chunks = (q.hidden + Up::kChunk - 1) / Up::kChunk;
  p.scales = scales_of(q, q.w1_scale, 2 * q.inter, q.hidden);
  p.up_rows = q.inter;
  p.expert_rows = 2 * q.inter / 8;
  p.out = s.act;
  p.out_step = q.inter;
  p.permuted = kFp8;
  hopper::LaunchShape shape;
  shape.grid = dim3(multiprocessors(q.device));
  shape.threads = kManyThreads;
  shape.shared_bytes = Up::kSharedBytes;
  hopper::launch_dependent(kOp, q.device, q.stream, many_kernel<T, Up>, shape, gated_map(q, kItem),
                           rows_map(q, s.rows, q.hidden, q.pairs(), Up::kBox, 2), p);

  p.rows = s.sorted;
  p.n = q.hidden;
  p.row_tiles = (q.hidden + Down::kFeatures - 1) / Down::kFeatures;
  p.chunks = (q.inter + Down::kChunk - 1) / Down::kChunk;
  p.scales = scales_of(q, q.w2_scale, q.hidden, q.inter);
  p.up_rows = 0;
  p.expert_rows = q.hidden;
  p.out = s.rows;
  p.out_step = q.hidden;
  p.permuted = false;
  shape.shared_bytes = Down::kSharedBytes;
  hopper::launch_dependent(kOp, q.device, q.stream, many_kernel<T, Down>, shape,
                           rows_map(q, q.w2, q.inter, int64_t{q.experts} * q.hidden, kTileRows, kItem),
                           rows_map(q, s.act, q.inter, q.pairs(), Down::kBox, 2), p);
  combine(q, s.rows);
}

// Up to 32 pairs an expert in the mean the weights' bytes bound the product: small tiles, a deep ring.
template <class T, bool kFp8>
void many(const Problem& q, const Scratch& s) {
  q.pairs() <= 32 * q.routing.named ? launch_many<T, kFp8, 64>(q, s) : launch_many<T, kFp8, kFp8 ? 128 : 256>(q, s);
}

}  // namespace radix::experts
