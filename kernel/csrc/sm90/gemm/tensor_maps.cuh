// Tensor maps of a product's operands: 128 bytes of k a row, 128-byte swizzle.
#pragma once

#include "sm90/common/tma.cuh"
#include "sm90/gemm/problem.cuh"

namespace radix::gemm {

inline CUtensorMapDataType map_type(DType type) {
  return type == DType::f8e4m3 || type == DType::i8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : type == DType::bf16                      ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                    : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

using sm90::map_stride;

// [k, rows, batch]: boxes of `rows` tokens.
inline sm90::TensorMap token_map(const Problem& q, int rows) {
  const uint64_t step = map_stride(q.x_step, q.m, q.k * q.element_size());
  const sm90::TileShape shape = {3,
                                 {uint64_t(q.k), uint64_t(q.m), uint64_t(q.batch)},
                                 {step, map_stride(q.x_batch, q.batch, step)},
                                 {uint32_t(128 / q.element_size()), uint32_t(rows), 1}};
  return sm90::make_tensor_map(q.x, map_type(q.type), shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

// [k, rows, batch, 1]; gated [k, 8, 2, n / 16], so that a box alternates between 8 gate rows and 8 up rows.
inline sm90::TensorMap weight_map(const Problem& q, int rows) {
  const uint64_t step = map_stride(q.weight_step, q.n, q.k * q.element_size());
  const uint32_t chunk = 128 / q.element_size();
  sm90::TileShape shape = {4,
                           {uint64_t(q.k), uint64_t(q.n), uint64_t(q.batch), 1},
                           {step, map_stride(q.weight_batch, q.batch, step), step},
                           {chunk, uint32_t(rows), 1, 1}};
  if (q.gated()) {
    const bool halves = q.epilogue.gate == Gate::halves;
    shape = {4,
             {uint64_t(q.k), 8, 2, uint64_t(q.n / 16)},
             {halves ? step : 2 * step, halves ? step * (q.n / 2) : step, halves ? 8 * step : 16 * step},
             {chunk, 8, 2, uint32_t(rows / 16)}};
  }
  return sm90::make_tensor_map(q.weight, map_type(q.type), shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

// [n, rows, batch] of the result: boxes of 64 rows, `columns` (64 bytes) wide.
inline sm90::TensorMap result_map(const Problem& q, int columns) {
  const int all = q.gated() ? q.n / 2 : q.n;
  const uint64_t step = map_stride(q.epilogue.out_step * 2, q.m, all * 2);
  const sm90::TileShape shape = {
      3, {uint64_t(all), uint64_t(q.m), uint64_t(q.batch)}, {step, step * q.m}, {uint32_t(columns), 64, 1}};
  return sm90::make_tensor_map(q.epilogue.out, map_type(q.out_type), shape, CU_TENSOR_MAP_SWIZZLE_64B);
}

}  // namespace radix::gemm
