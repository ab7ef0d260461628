// Scales of a packed weight as float32, and products with them.
#pragma once

#include "gpu/device/element.h"
#include "sm90/common/convert.cuh"
#include "sm90/linear/widen.cuh"

namespace radix::linear {

// Scale `at`, counted from `scales`, of the dtype that the weight has them in (e8m0 for e2m1).
template <Code kCode>
__device__ inline float scale_at(const char* scales, DType type, int64_t at) {
  if constexpr (kCode == Code::e2m1) {
    return power_of_two(reinterpret_cast<const uint8_t*>(scales)[at]);
  } else {
    if (type == DType::bf16) return gpu::to_float(reinterpret_cast<const bf16*>(scales)[at]);
    if (type == DType::f16) return gpu::to_float(reinterpret_cast<const f16*>(scales)[at]);
    return reinterpret_cast<const float*>(scales)[at];
  }
}

// Both halves times `scale`, rounded once.
template <class T>
__device__ inline uint32_t scaled_pair(uint32_t pair, float scale) {
  T low, high;
  low.bits = static_cast<uint16_t>(pair);
  high.bits = static_cast<uint16_t>(pair >> 16);
  return sm90::round_pair<T>(gpu::to_float(low) * scale, gpu::to_float(high) * scale);
}

}  // namespace radix::linear
