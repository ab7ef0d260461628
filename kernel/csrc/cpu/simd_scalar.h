// One element at a time: conversions between storage types and float. Rounds to nearest even, keeps NaN and subnormals.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/dtype.h"

namespace radix::cpu::RK_ISA {

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline float to_float(float x) {
  return x;
}

inline float to_float(int8_t x) {
  return x;
}

inline float to_float(bf16 x) {
  return float_of(uint32_t{x.bits} << 16);
}

inline float to_float(f16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, mag = x.bits & 0x7fffu;
  if (mag >= 0x7c00u) return float_of(sign | ((mag << 13) + 0x70000000u));  // inf, NaN
  if (mag < 0x0400u) return float_of(sign | bits_of(static_cast<float>(mag) * 0x1p-24f));
  return float_of(sign | ((mag << 13) + 0x38000000u));
}

inline void from_float(float x, float& out) {
  out = x;
}

inline void from_float(float x, bf16& out) {
  const uint32_t u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) {
    out.bits = static_cast<uint16_t>(u >> 16 | 0x40u);
  } else {
    out.bits = static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
  }
}

inline void from_float(float x, f16& out) {
  const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000u;
  uint32_t mag = u & 0x7fffffffu;
  if (mag > 0x7f800000u) {
    mag = 0x7e00u | (mag >> 13 & 0x3ffu);
  } else if (mag >= 0x477ff000u) {  // 65520 and up round to infinity
    mag = 0x7c00u;
  } else if (mag < 0x38800000u) {  // subnormal: the last place of 0.5f is fp16's smallest step
    mag = bits_of(float_of(mag) + 0.5f) - 0x3f000000u;
  } else {
    mag = (mag + 0xfffu + (mag >> 13 & 1u) - 0x38000000u) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | mag);
}

}  // namespace radix::cpu::RK_ISA
