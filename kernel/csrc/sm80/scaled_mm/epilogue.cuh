// From a warp's sums, as mma.sync leaves them in its registers, to the result.
#pragma once

#include "gpu/device/element.h"
#include "sm80/scaled_mm/problem.h"

namespace radix::scaled_mm {

// mma.sync m16n8: a lane holds two neighbouring columns, 2 * (lane % 4) and the next, of rows lane / 4 and 8 more.
constexpr int kMmaRows = 16, kMmaColumns = 8, kHalves = 2, kLanesOfRow = 4, kRowsOfHalf = 8;

// Two neighbouring columns' share of the epilogue.
struct ColumnPair {
  float scale[2], bias[2];
  int32_t sum[2];
};

__device__ inline float bias_at(const Epilogue& e, int column) {
  if (!e.bias) return 0.f;
  if (e.bias_is_float) return reinterpret_cast<const float*>(e.bias)[column];
  return e.out_is_f16 ? gpu::to_float(reinterpret_cast<const f16*>(e.bias)[column])
                      : gpu::to_float(reinterpret_cast<const bf16*>(e.bias)[column]);
}

__device__ inline ColumnPair load_columns(const Epilogue& e, int column) {
  ColumnPair pair;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    pair.scale[i] = e.scale_w[(column + i) * e.scale_w_step];
    pair.bias[i] = bias_at(e, column + i);
    pair.sum[i] = e.zeros ? e.weight_sums[column + i] : 0;
  }
  return pair;
}

// What a zero point adds to an INT8 sum is taken off in int32, where the difference is exact.
__device__ inline float without_zero(int32_t sum, int32_t zero, int32_t column_sum) {
  return static_cast<float>(sum - zero * column_sum);
}
__device__ inline float without_zero(float sum, int32_t, int32_t) {
  return sum;
}

__device__ inline void store_two(const Epilogue& e, int64_t row, int column, const float (&v)[2]) {
  char* to = e.out + (row * e.out_step + column) * 2;
  if (e.out_is_f16) {
    gpu::store_pack(reinterpret_cast<f16*>(to), gpu::round_pack<2, f16>(v));
  } else {
    gpu::store_pack(reinterpret_cast<bf16*>(to), gpu::round_pack<2, bf16>(v));
  }
}

// The sums of kRows x kColumns instructions, in the order in which CUTLASS's warps hold them: rows change fastest. The
// warp's first element is at (row, column). n is even and columns come in pairs, so a pair is whole or not there.
template <int kRows, int kColumns, class Sum>
__device__ inline void finish_warp(const Epilogue& e, const Sum* sums, int row, int column, int m, int n, int lane) {
  row += lane / kLanesOfRow;
  column += lane % kLanesOfRow * 2;
#pragma unroll
  for (int j = 0; j < kColumns; j++) {
    const int first = column + j * kMmaColumns;
    if (first >= n) break;
    const ColumnPair pair = load_columns(e, first);
#pragma unroll
    for (int i = 0; i < kRows * kHalves; i++) {
      const int token = row + i * kRowsOfHalf;
      if (token >= m) break;
      const float scale = e.scale_x[token * e.scale_x_step];
      const int32_t zero = e.zeros ? e.zeros[token * e.zeros_step] : 0;
      const Sum* two = sums + (j * kRows * kHalves + i) * 2;
      float v[2];
#pragma unroll
      for (int c = 0; c < 2; c++)
        v[c] = fmaf(without_zero(two[c], zero, pair.sum[c]), scale * pair.scale[c], pair.bias[c]);
      store_two(e, token, first, v);
    }
  }
}

}  // namespace radix::scaled_mm
