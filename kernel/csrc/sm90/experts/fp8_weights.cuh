// FP8 weights: their scales, and how their elements become those of the activations.
#pragma once

#include "gpu/device/element.h"
#include "gpu/device/fp8.h"
#include "sm90/common/convert.cuh"
#include "sm90/experts/problem.cuh"

namespace radix::experts {

// Scales of FP8 weights; for others unused.
struct Scales {
  const float* data;    // or null
  int64_t expert, row;  // steps between experts and blocks of 128 rows
  int unit;             // and units (blocks of 128 along k); 0: one an expert
  int last_unit;        // with a scale

  __device__ const float* of(int local, int first_row) const { return data + local * expert + first_row / 128 * row; }
  __device__ float at(const float* scale, int index) const { return data ? scale[index * unit] : 1.f; }
};

// Of a weight with so many rows an expert, `k` elements each.
inline Scales scales_of(const Problem& q, const float* data, int rows, int k) {
  if (!data || !q.block_scales) return {data, 1, 0, 0, 0};
  const int64_t blocks = (k + 127) / 128;
  return {data, (rows + 127) / 128 * blocks, blocks, 1, static_cast<int>(blocks) - 1};
}

// The scale of values of which `largest` is the largest, and they in FP8 (as per_token_group_quant, but multiplied by
// the scale's inverse).
struct QuantScale {
  float value, inverse;

  __device__ explicit QuantScale(float largest)
      : value(fmaxf(largest, 1e-10f) / e4m3::kLargest), inverse(e4m3::kLargest / fmaxf(largest, 1e-10f)) {}

  // Eight of them.
  __device__ uint2 quantized(const float* v) const {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      uint16_t pairs[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float high = v[i + 2 * j + 1] * inverse, low = v[i + 2 * j] * inverse;
        pairs[j] = gpu::to_e4m3_pair(low, high);
      }
      words[i / 4] = pairs[0] | uint32_t{pairs[1]} << 16;
    }
    return make_uint2(words[0], words[1]);
  }
};

// Eight elements in FP8 and the scale of their group of 128, whose others 15 neighbouring lanes hold. All lanes of a
// warp call.
struct QuantizedEight {
  uint2 codes;
  float scale;

  template <class T>
  __device__ explicit QuantizedEight(const gpu::Pack<T, 8>& pack) {
    float v[8], largest = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      v[j] = gpu::to_float(pack.at[j]);
      largest = fmaxf(largest, fabsf(v[j]));
    }
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    const QuantScale found(largest);
    codes = found.quantized(v);
    scale = found.value;
  }
};

// x where FP8 weights come from registers (grouped_swap_ab_kernel.cuh): of 16 elements e the order is 0 1 4 5 8 9
// 12 13, then 2 3 6 7 10 11 14 15. Piece `piece` (even: the first eight) from the two that hold the sixteen.
__device__ inline uint4 permuted_piece(const uint4& a, const uint4& b, int piece) {
  return piece % 2 ? make_uint4(a.y, a.w, b.y, b.w) : make_uint4(a.x, a.z, b.x, b.z);
}

}  // namespace radix::experts
