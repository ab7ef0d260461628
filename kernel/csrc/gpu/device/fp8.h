// FP8 elements on the device: e4m3 as OCP defines it ("fn": no infinities) and as AMD's gfx942 has it ("fnuz": no
// negative zero either). Every rounding to FP8 is here: to nearest even, saturating, NaN stays NaN.
#pragma once

#include "common/tensor.h"
#include "gpu/device/element.h"

namespace radix {

struct e4m3 {
  static constexpr int kBias = 7;
  static constexpr float kLargest = 448.f;
  static constexpr uint8_t kNan = 0x7f;
  static constexpr bool kNegativeZero = true;
  uint8_t bits;
};
struct e4m3fnuz {
  static constexpr int kBias = 8;
  static constexpr float kLargest = 240.f;
  static constexpr uint8_t kNan = 0x80;
  static constexpr bool kNegativeZero = false;
  uint8_t bits;
};
static_assert(sizeof(e4m3) == 1 && sizeof(e4m3fnuz) == 1);

namespace backend {
// The FP8 format of a GPU's instructions, as NativeE4m3 below.
DType native_fp8(rk_device device);
}  // namespace backend

namespace gpu {

// The byte of x, in integer arithmetic: for GPUs without the instruction.
template <class F>
__device__ inline uint8_t to_fp8(float x) {
  const float a = fminf(fabsf(x), F::kLargest);
  constexpr float kSmallestNormal = F::kBias == 7 ? 0x1p-6f : 0x1p-7f;
  uint32_t code;
  if (a < kSmallestNormal) {
    code = static_cast<uint32_t>(rintf(a * (8.f / kSmallestNormal)));  // 8 is the smallest normal number's code
  } else {
    const uint32_t u = __float_as_uint(a);
    code = ((u + 0x7ffffu + (u >> 20 & 1u)) >> 20) - ((127 - F::kBias) << 3);
  }
  if (x != x) return F::kNan;
  const bool negative = __float_as_uint(x) >> 31;
  return static_cast<uint8_t>(code | (negative && (F::kNegativeZero || code != 0) ? 0x80u : 0u));
}

// Two at a time, `low` to the lower byte: one instruction from sm_89 on.
__device__ inline uint16_t to_e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return static_cast<uint16_t>(to_fp8<e4m3>(low) | to_fp8<e4m3>(high) << 8);
#endif
}
__device__ inline void from_float(float x, e4m3& out) {
  out.bits = static_cast<uint8_t>(to_e4m3_pair(x, 0.f));
}

#if defined(__HIP__)
// Whether the chip that the code is compiled for rounds to F by an instruction.
#if defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__)
template <class F>
constexpr bool kRoundsTo = __is_base_of(e4m3fnuz, F);
#elif defined(__gfx950__)
template <class F>
constexpr bool kRoundsTo = __is_base_of(e4m3, F);
#else
template <class F>
constexpr bool kRoundsTo = false;
#endif

// The instruction makes NaN of what is too large.
template <class F>
__device__ inline float saturated(float x) {
  const float clamped = __builtin_amdgcn_fmed3f(x, -F::kLargest, F::kLargest);
  return x != x ? x : clamped;
}

// N numbers, an even number of them, by AMD's instruction: two at a time.
template <class F, int N>
__device__ inline Pack<uint8_t, N> convert_to_fp8(const float (&v)[N]) {
  Pack<uint8_t, N> out;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    int word = __builtin_amdgcn_cvt_pk_fp8_f32(saturated<F>(v[i]), saturated<F>(v[i + 1]), 0, false);
    if constexpr (N % 4 == 0)
      word = __builtin_amdgcn_cvt_pk_fp8_f32(saturated<F>(v[i + 2]), saturated<F>(v[i + 3]), word, true);
    __builtin_memcpy(&out.at[i], &word, N % 4 == 0 ? 4 : 2);
  }
  return out;
}
#endif

template <class F, int N>
__device__ inline Pack<uint8_t, N> to_fp8(const float (&v)[N]) {
#if defined(__HIP__)
  if constexpr (kRoundsTo<F> && (N == 2 || N % 4 == 0)) return convert_to_fp8<F>(v);
#endif
  Pack<uint8_t, N> out;
  if constexpr (__is_same(F, e4m3) && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint16_t pair = to_e4m3_pair(v[i], v[i + 1]);
      out.at[i] = static_cast<uint8_t>(pair);
      out.at[i + 1] = static_cast<uint8_t>(pair >> 8);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) out.at[i] = to_fp8<F>(v[i]);
  }
  return out;
}

// The number that a byte of OCP's e4m3 stands for, exactly, on any GPU.
__device__ inline float from_e4m3(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  float x = __uint_as_float((magnitude << 20) + (120u << 23));
  if (magnitude < 8) x = static_cast<float>(magnitude) * 0x1p-9f;
  if (magnitude == e4m3::kNan) x = __uint_as_float(0x7fc00000u);
  return code & 0x80 ? -x : x;
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

// The format of the chip that the code is compiled for. On AMD it is one type in host code and for every target, so
// that a kernel has one name: fnuz on gfx94x, OCP's elsewhere.
#if defined(__HIP__)
#if defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__)
struct NativeE4m3 : e4m3fnuz {};
#else
struct NativeE4m3 : e4m3 {};
#endif
#else
using NativeE4m3 = e4m3;
#endif

// Fails unless x has the FP8 format of its GPU.
inline void require_native_fp8(const char* op, const char* name, const rk_tensor& x) {
  const DType expected = backend::native_fp8(x.device);
  if (dtype_of(x) == expected) return;
  const char* text = expected == DType::f8e4m3 ? "float8_e4m3fn" : "float8_e4m3fnuz";
  fail(RK_UNSUPPORTED, "%s: %s has another dtype than this GPU's FP8, %s", op, name, text);
}

}  // namespace gpu
}  // namespace radix
