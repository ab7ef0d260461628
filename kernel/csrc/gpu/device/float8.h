// FP8 elements on the device: e4m3 as OCP defines it and as AMD's gfx942 has it.
#pragma once

#include "common/tensor.h"
#include "gpu/device/element.h"

namespace radix::gpu {

struct E4m3 {
  static constexpr int kBias = 7;
  static constexpr float kLargest = 448.f;
  static constexpr uint8_t kNan = 0x7f;
  static constexpr bool kNegativeZero = true;
};
struct E4m3Fnuz {
  static constexpr int kBias = 8;
  static constexpr float kLargest = 240.f;
  static constexpr uint8_t kNan = 0x80;
  static constexpr bool kNegativeZero = false;
};

// The byte of x: rounded to nearest even, clamped, NaN stays NaN.
template <class F>
__device__ inline uint8_t to_float8(float x) {
  const float a = fminf(fabsf(x), F::kLargest);
  constexpr float kSmallestNormal = F::kBias == 7 ? 0x1p-6f : 0x1p-7f;
  uint32_t code;
  if (a < kSmallestNormal) {
    code = static_cast<uint32_t>(rintf(a * (8.f / kSmallestNormal)));  // 8 is the smallest normal number's code
  } else {
    const uint32_t u = __float_as_uint(a);
    code = (u + 0x7ffffu + (u >> 20 & 1u) >> 20) - ((127 - F::kBias) << 3);
  }
  if (x != x) return F::kNan;
  const bool negative = __float_as_uint(x) >> 31;
  return static_cast<uint8_t>(code | (negative && (F::kNegativeZero || code != 0) ? 0x80u : 0u));
}

template <class F, int N>
__device__ inline Pack<uint8_t, N> to_float8(const float (&v)[N]) {
  Pack<uint8_t, N> out;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  static_assert(F::kNegativeZero && N % 2 == 0);
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(v[i + 1]), "f"(v[i]));
    out.at[i] = static_cast<uint8_t>(pair);
    out.at[i + 1] = static_cast<uint8_t>(pair >> 8);
  }
#else
#pragma unroll
  for (int i = 0; i < N; i++) out.at[i] = to_float8<F>(v[i]);
#endif
  return out;
}

// v / scale, rounded as the division does, which costs several times as much: a product with the reciprocal, corrected
// once. A quotient that is about to overflow, and so beyond every format, stays as it is: its correction would be NaN.
template <int N>
__device__ inline void divide(float (&v)[N], float scale) {
  const float inverse = 1.f / scale;
  if (inverse > 0x1p-100f && inverse < 0x1p100f) {
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float quotient = v[j] * inverse, corrected = fmaf(fmaf(-quotient, scale, v[j]), inverse, quotient);
      v[j] = fabsf(quotient) < 1e30f ? corrected : quotient;
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = v[j] / scale;
  }
}

// The format of this backend's GPUs.
#if defined(__HIP__)
using NativeE4m3 = E4m3Fnuz;
constexpr DType kNativeE4m3 = DType::f8e4m3fnuz;
#else
using NativeE4m3 = E4m3;
constexpr DType kNativeE4m3 = DType::f8e4m3;
#endif

inline void require_native_float8(const char* op, const char* name, const rk_tensor& x) {
  if (dtype_of(x) != kNativeE4m3)
    fail(RK_UNSUPPORTED, "%s: %s has another dtype than this library's GPUs, %s", op, name,
         kNativeE4m3 == DType::f8e4m3 ? "float8_e4m3fn" : "float8_e4m3fnuz");
}

}  // namespace radix::gpu
