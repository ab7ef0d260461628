// The tensor map of x.
#pragma once

#include "sm90/common/tma.cuh"
#include "sm90/linear/problem.cuh"

namespace radix::linear {

inline CUtensorMapDataType x_type(const gemm::Problem& q) {
  return q.type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// [k, rows]: boxes of 64 k of `tokens` rows. k need not be whole pieces of 16 bytes; what lies beyond it reads as 0.
inline sm90::TensorMap x_map(const gemm::Problem& q, int tokens) {
  const sm90::TileShape shape = {2,
                                 {uint64_t(q.k), uint64_t(q.m)},
                                 {sm90::map_stride(q.x_step, q.m, (int64_t{q.k} * 2 + 15) / 16 * 16)},
                                 {kTileK, uint32_t(tokens)}};
  return sm90::make_tensor_map(q.x, x_type(q), shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

// [64 of k, rows, tiles of k]: boxes of `tiles` such tiles, one after the other. k is a multiple of 64.
inline sm90::TensorMap x_map_by_tiles(const gemm::Problem& q, int tokens, int tiles) {
  const uint64_t row = sm90::map_stride(q.x_step, q.m, int64_t{q.k} * 2);
  const sm90::TileShape shape = {3,
                                 {kTileK, uint64_t(q.m), uint64_t(q.k / kTileK)},
                                 {row, kTileK * 2},
                                 {kTileK, uint32_t(tokens), uint32_t(tiles)}};
  return sm90::make_tensor_map(q.x, x_type(q), shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace radix::linear
