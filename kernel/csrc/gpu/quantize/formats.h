// What quantized numbers are: FP8 (gpu/device/fp8.h) or INT8, and how a group's scale follows from its largest value.
#pragma once

#include "gpu/device/fp8.h"
#include "gpu/device/reduce.h"

namespace radix::quantize {

using namespace gpu;

// Codes of -127 .. 127. As the products of the CPU have it: scale = largest / 127, code = round(value * (127 /
// largest)), to nearest even; a group of zeros has scale 0, one with a NaN or an infinity scale NaN, both have codes of
// 0.
struct Int8 {
  static constexpr float kLargest = 127.f;
};

template <class F>
struct Scale {
  float value;
};
template <>
struct Scale<Int8> {
  float value, inverse;
};

constexpr float kSmallest = 1e-10f;  // stands for the largest value of a group of zeros in FP8
constexpr float kInfinity = __builtin_inff();

template <class F>
__device__ inline Scale<F> scale_of(float largest) {
  if constexpr (__is_same(F, Int8)) {
    const float inverse = largest > 0 ? Int8::kLargest / largest : 0.f;
    return {largest < kInfinity ? largest / Int8::kLargest : __builtin_nanf(""), inverse < 3e38f ? inverse : 0.f};
  } else {
    return {fmaxf(largest, kSmallest) / F::kLargest};
  }
}

// A NaN keeps to itself in FP8; in INT8 it counts as an infinity, for no code stands for it.
template <class F>
__device__ inline float magnitude(float v) {
  if constexpr (__is_same(F, Int8)) {
    return v == v ? fabsf(v) : kInfinity;
  } else {
    return fabsf(v);
  }
}

template <class F, int N>
__device__ inline float largest_of(const float (&v)[N]) {
  float largest = 0;
#pragma unroll
  for (int j = 0; j < N; j++) largest = fmaxf(largest, magnitude<F>(v[j]));
  return largest;
}

// The largest of a group's values, which `lanes` neighbouring lanes hold. Every lane of the warp calls it.
template <class F, int N>
__device__ inline float largest_of_group(const float (&v)[N], int lanes) {
  float largest = largest_of<F>(v);
  for (int mask = lanes / 2; mask > 0; mask /= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
  return largest;
}

template <class F, int N>
__device__ inline void store_quantized(uint8_t* out, float (&v)[N], Scale<F> scale) {
  if constexpr (__is_same(F, Int8)) {
    Pack<uint8_t, N> codes;
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float x = scale.inverse > 0 ? v[j] * scale.inverse : 0.f;
      codes.at[j] = static_cast<uint8_t>(static_cast<int>(rintf(x)));
    }
    store_pack<N>(out, codes);
  } else {
    divide(v, scale.value);
    store_pack<N>(out, to_fp8<F>(v));
  }
}

}  // namespace radix::quantize
