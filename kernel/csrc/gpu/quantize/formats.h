// What quantized numbers are: FP8 (gpu/device/fp8.h) or INT8, and how a group's scale follows from its largest value.
#pragma once

#include "gpu/device/fp8.h"
#include "gpu/device/reduce.h"

namespace radix::quantize {

using namespace gpu;

constexpr int kMostThreads = 1024;  // of a block

// Codes of -127 .. 127. As the products of the CPU have it: scale = largest / 127, code = round(value * (127 /
// largest)), to nearest even; a group of zeros has scale 0, one with a NaN or an infinity scale NaN, both have codes of
// 0.
struct Int8 {
  static constexpr float kLargest = 127.f;
};

// What a group is divided by. One thread of a group asks for the value that is stored: it has a division of its own.
template <class F>
struct Scale {
  float divisor;
  __device__ float value() const { return divisor; }
};
template <>
struct Scale<Int8> {
  float largest, inverse;
  __device__ float value() const;
};

constexpr float kSmallest = 1e-10f;  // stands for the largest value of a group of zeros in FP8
constexpr float kInfinity = __builtin_inff();

__device__ inline float Scale<Int8>::value() const {
  return largest < kInfinity ? largest / Int8::kLargest : __builtin_nanf("");
}

template <class F>
__device__ inline Scale<F> scale_of(float largest) {
  if constexpr (__is_same(F, Int8)) {
    const float inverse = largest > 0 ? Int8::kLargest / largest : 0.f;
    return {largest, inverse < 3e38f ? inverse : 0.f};
  } else {
    return {fmaxf(largest, kSmallest) / F::kLargest};
  }
}

// The larger of `largest` and |v|. In FP8 a NaN keeps to itself; in INT8 no code stands for it, so that it, or an
// infinity in its place, is larger than all.
template <class F>
__device__ inline float larger(float largest, float v) {
  if constexpr (__is_same(F, Int8)) {
#if defined(__HIP__)
    return fmaxf(largest, v == v ? fabsf(v) : kInfinity);
#else
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(largest), "f"(fabsf(v)));
    return largest;
#endif
  } else {
    return fmaxf(largest, fabsf(v));
  }
}

template <class F, int N>
__device__ inline float largest_of(const float (&v)[N], float largest = 0) {
#pragma unroll
  for (int j = 0; j < N; j++) largest = larger<F>(largest, v[j]);
  return largest;
}

// Of the lanes of a warp, whose numbers have no sign: their bits are ordered as they are, a NaN's above all.
__device__ inline float largest_of_warp(float largest) {
#if defined(__HIP__)
  return warp_reduce(largest, Max());
#else
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(largest)));
#endif
}

// Of a block of any number of whole warps. Between two calls of a kernel all threads meet at a barrier.
__device__ inline float largest_of_block(float largest) {
  __shared__ float part[kMostThreads / RK_WARP];
  const int warps = blockDim.x / RK_WARP, lane = threadIdx.x % RK_WARP;
  largest = largest_of_warp(largest);
  if (warps == 1) return largest;
  if (lane == 0) part[threadIdx.x / RK_WARP] = largest;
  __syncthreads();
  return largest_of_warp(lane < warps ? part[lane] : 0.f);
}

// The largest of a group's values, which `lanes` neighbouring lanes hold. Every lane of the warp calls it.
template <class F, int N>
__device__ inline float largest_of_group(const float (&v)[N], int lanes) {
  float largest = largest_of<F>(v);
  for (int mask = lanes / 2; mask > 0; mask /= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
  return largest;
}

// round(v * factor), to nearest even, as the low byte of the result; |v * factor| < 2^22. Beside 1.5 * 2^23 a float has
// no bits below 1, so that the sum is the rounding: instructions that convert run at a fraction of an addition's rate.
// Product and sum are rounded apart, as the names say to nvcc.
__device__ inline uint32_t rounded_byte(float v, float factor) {
  return __float_as_uint(__fadd_rn(__fmul_rn(v, factor), 0x1.8p23f));
}

// The low bytes of four words.
__device__ inline uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#if defined(__HIP__)
  return (a & 0xffu) | (b & 0xffu) << 8 | (c & 0xffu) << 16 | d << 24;
#else
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
#endif
}

template <int N>
__device__ inline Pack<uint32_t, N / 4> to_int8(const float (&v)[N], Scale<Int8> scale) {
  Pack<uint32_t, N / 4> words;
#pragma unroll
  for (int j = 0; j < N; j += 4) {
    const uint32_t word = low_bytes(rounded_byte(v[j], scale.inverse), rounded_byte(v[j + 1], scale.inverse),
                                    rounded_byte(v[j + 2], scale.inverse), rounded_byte(v[j + 3], scale.inverse));
    words.at[j / 4] = scale.inverse > 0 ? word : 0;
  }
  return words;
}

// Words, not the bytes of to_fp8(): nvcc takes those apart before it stores them.
template <class F, int N>
__device__ inline Pack<uint32_t, N / 4> to_fp8_words(const float (&v)[N]) {
  Pack<uint32_t, N / 4> words;
#if defined(__HIP__)
  const auto codes = to_fp8<F>(v);
  memcpy(&words, &codes, sizeof(words));
#else
  static_assert(__is_same(F, e4m3));
#pragma unroll
  for (int j = 0; j < N; j += 4)
    words.at[j / 4] = to_e4m3_pair(v[j], v[j + 1]) | uint32_t{to_e4m3_pair(v[j + 2], v[j + 3])} << 16;
#endif
  return words;
}

// Changes v.
template <class F, int N>
__device__ inline void store_quantized(uint8_t* out, float (&v)[N], Scale<F> scale) {
  if constexpr (__is_same(F, Int8)) {
    store_pack<N / 4>(reinterpret_cast<uint32_t*>(out), to_int8(v, scale));
  } else {
    divide(v, scale.value());
    store_pack<N / 4>(reinterpret_cast<uint32_t*>(out), to_fp8_words<F>(v));
  }
}

}  // namespace radix::quantize
