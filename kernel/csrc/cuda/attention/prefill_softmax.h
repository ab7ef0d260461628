// The softmax of prefill, and the rounding of its results.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "common/dtype.h"

namespace radix::attention::prefill {

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 - 2 / (1 + e^2x): within 2e-7, which tanh.approx is not.
__device__ inline float tanh_fast(float x) {
  return 1.f - __fdividef(2.f, 1.f + exp2_fast(x * 2.885390081777927f));
}

// Four e4m3.
__device__ inline uint32_t pack(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

template <class T>
__device__ inline uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// The online softmax of a thread's two rows; a row is spread over the four threads of a quad.
struct Softmax {
  float top[2] = {-INFINITY, -INFINITY};  // largest score so far, nearly
  float sum[2] = {0, 0};                  // of this thread's probabilities
  float shrink[2];                        // what the last step made of earlier ones

  // Of this thread's scores of row r. Floats that are not negative compare like integers, of which one instruction
  // takes three; the order of negative ones is the reverse.
  template <int R>
  __device__ static float largest(const float (&s)[R], int r) {
    int most[2] = {INT_MIN, INT_MIN};
#pragma unroll
    for (int i = 0; i < R; i += 4)
      most[i / 4 % 2] = __vimax3_s32(most[i / 4 % 2], __float_as_int(s[i + 2 * r]), __float_as_int(s[i + 2 * r + 1]));
    if (max(most[0], most[1]) >= 0) return __int_as_float(max(most[0], most[1]));
    unsigned least = UINT_MAX;
#pragma unroll
    for (int i = 0; i < R; i += 4)
      least = __vimin3_u32(least, __float_as_uint(s[i + 2 * r]), __float_as_uint(s[i + 2 * r + 1]));
    return __uint_as_float(least);
  }

  // s becomes exp2((s - top) * scale + raise). The maximum stays where it would grow by no more than `slack`, so
  // probabilities come out up to 2^(raise + slack).
  template <int R>
  __device__ void step(float (&s)[R], float scale, float raise, float slack) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float t = fmaxf(top[r], largest(s, r));
      t = fmaxf(t, __shfl_xor_sync(~0u, t, 1));
      t = fmaxf(t, __shfl_xor_sync(~0u, t, 2));
      if ((t - top[r]) * scale <= slack) t = top[r];
      const float base = t == -INFINITY ? 0.f : t * scale - raise;
      shrink[r] = t == top[r] ? 1.f : exp2_fast((top[r] - t) * scale);  // exactly 1 where the maximum stays
      top[r] = t;
      float part[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < R; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[i + 2 * r + e];
          x = exp2_fast(fmaf(x, scale, -base));
          part[e] += x;
        }
      }
      sum[r] = fmaf(sum[r], shrink[r], part[0] + part[1]);
    }
  }
};

}  // namespace radix::attention::prefill
