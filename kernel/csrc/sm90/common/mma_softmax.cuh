// The softmax of scores as the tensor core leaves them, over 16-row tiles of queries and groups of 8 tokens.
//
// Lane (g, j) = (lane / 4, lane % 4) of a warp holds, for each tile and group, [0, 1] = row g, tokens 2j and 2j + 1,
// and [2, 3] = the same of row g + 8.
#pragma once

#include "sm90/common/convert.cuh"
#include "sm90/common/math.cuh"
#include "sm90/common/split_state.cuh"

namespace radix::split_kv {

// The rows of a lane: what is applied to their scores, and where they stand.
template <int kTiles>
struct RowFacts {
  float scale[kTiles][2];
  int position[kTiles][2];
};

// bf16 to f16, for products with FP8: a row of Q, spread over the four lanes j, is divided by the power of two that
// brings its largest element to 256 or above; returns that power.
template <int kSteps>
__device__ inline float narrow_row(uint2 (&raw)[kSteps]) {
  const auto low = [](uint32_t x) { return __uint_as_float(x << 16); };
  const auto high = [](uint32_t x) { return __uint_as_float(x & 0xffff0000u); };
  const auto larger = [&](float top, uint32_t x) { return fmaxf(top, fmaxf(fabsf(low(x)), fabsf(high(x)))); };
  float top = 0;
#pragma unroll
  for (int s = 0; s < kSteps; s++) top = larger(larger(top, raw[s].x), raw[s].y);
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  // The exponent, bounded so that both factors stay normal.
  const int exponent = min(max(static_cast<int>(__float_as_uint(top) >> 23) - 127 - 8, -110), 110);
  const float down = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
  const auto both = [&](uint32_t x) { return round_pair<f16>(low(x) * down, high(x) * down); };
#pragma unroll
  for (int s = 0; s < kSteps; s++) raw[s] = make_uint2(both(raw[s].x), both(raw[s].y));
  return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

// A warp's running softmax. m in units of log2, l not yet summed over the lanes of a row; kOut tiles of 8 dimensions.
template <int kTiles, int kOut>
struct Running {
  static_assert(kTiles >= 1 && kTiles <= 2, "16 or 32 query rows; more would spill");
  static_assert(kTiles * kOut * 4 <= 192, "O lies in a warp's registers");
  float o[kTiles][kOut][4];
  float m[kTiles][2], l[kTiles][2];

  __device__ void reset() {
#pragma unroll
    for (int t = 0; t < kTiles; t++) {
#pragma unroll
      for (int i = 0; i < kOut; i++) o[t][i][0] = o[t][i][1] = o[t][i][2] = o[t][i][3] = 0.f;
      m[t][0] = m[t][1] = -INFINITY;
      l[t][0] = l[t][1] = 0.f;
    }
  }
  __device__ void sum_lanes() {
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        l[t][half] += __shfl_xor_sync(~0u, l[t][half], 1);
        l[t][half] += __shfl_xor_sync(~0u, l[t][half], 2);
      }
  }
};

// Scales, caps and masks the scores of tokens [first_token, ..), of which [begin, end) count. The cases are asked for
// once: a branch for each element would cost more than the arithmetic.
template <int kTiles, int kGroups>
__device__ inline void mask_and_scale(float (&s)[kTiles][kGroups][4], const RowFacts<kTiles>& rows, const Params& p,
                                      int first_token, int begin, int end, bool masked) {
  const auto each = [&](const auto& f) {
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
      for (int i = 0; i < kGroups; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) f(s[t][i][e], t, i, e);
  };
  if (p.softcap > 0) {
    // tanh by exp2: exact at both ends.
    const float steep = 2.f * kLog2e / p.softcap, top = p.softcap * kLog2e;
    each([&](float& x, int t, int, int e) {
      x = top * (1.f - __fdividef(2.f, 1.f + exp2_approx(x * rows.scale[t][e / 2] * steep)));
    });
  } else {
    each([&](float& x, int t, int, int e) { x *= rows.scale[t][e / 2] * kLog2e; });
  }
  if (!masked) return;
  const int at = first_token + threadIdx.x % 4 * 2;
  const bool causal = p.causal, window = p.window_left >= 0;
  each([&](float& x, int t, int i, int e) {
    const int token = at + i * 8 + e % 2, position = rows.position[t][e / 2];
    const int low = window ? max(begin, position - p.window_left) : begin, high = causal ? min(end, position + 1) : end;
    x = token >= low && token < high ? x : -INFINITY;
  });
}

// s becomes exp2(s - m); the running sums follow.
template <int kTiles, int kGroups, int kOut>
__device__ inline void online_softmax(float (&s)[kTiles][kGroups][4], Running<kTiles, kOut>& run) {
  float row_max[kTiles][2];
  bool raised = false;
#pragma unroll
  for (int t = 0; t < kTiles; t++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float x = -INFINITY;
#pragma unroll
      for (int i = 0; i < kGroups; i++) x = fmaxf(x, fmaxf(s[t][i][2 * half], s[t][i][2 * half + 1]));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      row_max[t][half] = fmaxf(run.m[t][half], x);
      raised |= row_max[t][half] > run.m[t][half];
    }
  if (__any_sync(~0u, raised)) {
#pragma unroll
    for (int t = 0; t < kTiles; t++) {
      float rescale[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        rescale[half] = exp2_diff(run.m[t][half], row_max[t][half]);
        run.l[t][half] *= rescale[half];
        run.m[t][half] = row_max[t][half];
      }
#pragma unroll
      for (int i = 0; i < kOut; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) run.o[t][i][e] *= rescale[e / 2];
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; t++)
#pragma unroll
    for (int i = 0; i < kGroups; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[t][i][e] = exp2_diff(s[t][i][e], run.m[t][e / 2]);
        run.l[t][e / 2] += s[t][i][e];
      }
}

}  // namespace radix::split_kv
