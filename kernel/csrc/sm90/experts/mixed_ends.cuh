// What becomes of a sum of experts over packed weights: its bias, and the gated activation.
#pragma once

#include "gpu/device/element.h"
#include "sm90/experts/mixed_problem.cuh"

namespace radix::experts {

// The bias at an index among those of all experts; there is one.
template <class T>
__device__ inline float bias_at(const MixedBias& bias, int64_t at) {
  if (bias.wide) return reinterpret_cast<const float*>(bias.data)[at];
  return gpu::to_float(reinterpret_cast<const T*>(bias.data)[at]);
}

// Adds those of neighbours, if there are any.
template <class T, int kCount>
__device__ inline void add_bias(const MixedBias& bias, float (&v)[kCount], int64_t at) {
  if (!bias.data) return;
#pragma unroll
  for (int j = 0; j < kCount; j++) v[j] += bias_at<T>(bias, at + j);
}

__device__ inline float activated(const MixedActivation& activation, float gate, float up) {
  const float limit = activation.limit;
  if (limit > 0) {  // NaN stays
    gate = gate > limit ? limit : gate;
    up = (up > limit ? limit : up < -limit ? -limit : up) + 1.f;
  }
  return __fdividef(gate, 1.f + __expf(-activation.alpha * gate)) * up;
}

}  // namespace radix::experts
