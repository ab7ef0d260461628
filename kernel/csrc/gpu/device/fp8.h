// float to e4m3 (OCP, "fn": no infinities, 448 is the largest).
#pragma once

#include "gpu/device/compat.h"

namespace radix::gpu {

constexpr float kE4m3Max = 448.f;

struct e4m3 {
  uint8_t bits;
};

// Round to nearest even, saturating; NaN stays NaN.
__device__ inline void from_float(float x, e4m3& out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
  out.bits = static_cast<uint8_t>(pair);
#else
  const uint32_t sign = __float_as_uint(x) >> 24 & 0x80u, u = __float_as_uint(x) & 0x7fffffffu;
  uint32_t magnitude;
  if (u > 0x7f800000u) {
    magnitude = 0x7fu;
  } else if (u >= 0x43e00000u) {  // 448
    magnitude = 0x7eu;
  } else if (u < 0x3c800000u) {  // 2^-6: the step is 2^-9, as that of floats in [2^14, 2^15)
    magnitude = __float_as_uint(__uint_as_float(u) + 16384.f) & 0xfu;
  } else {
    magnitude = (u + 0x7ffffu + (u >> 20 & 1u) - (120u << 23)) >> 20;
  }
  out.bits = static_cast<uint8_t>(sign | magnitude);
#endif
}

}  // namespace radix::gpu
