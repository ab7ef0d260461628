// 8-bit floats (e4m3fn: a bit of sign, four of exponent with bias 7, three of mantissa; the largest is 448, and only
// the codes 0x7f and 0xff are NaN), one element at a time.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace radix::cpu {

constexpr float kLargestE4m3 = 448;

inline bool is_nan_e4m3(uint8_t code) {
  return (code & 0x7f) == 0x7f;
}

// Rounded to nearest even, clamped, NaN stays NaN.
inline uint8_t to_e4m3(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (x != x) return sign | 0x7f;
  const float a = std::min(std::fabs(x), kLargestE4m3);
  // Below 2^-6 the step is 2^-9; above, 3 bits of the float's mantissa remain and the exponent's bias falls by 120.
  if (a < 0x1p-6f) return sign | static_cast<uint8_t>(std::nearbyint(a * 512));
  uint32_t u;
  std::memcpy(&u, &a, 4);
  return sign | static_cast<uint8_t>(((u + 0x7ffff + (u >> 20 & 1)) >> 20) - (120 << 3));
}

// What each code stands for.
inline const std::array<float, 256>& e4m3_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> all;
    for (int code = 0; code < 256; code++) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      float x = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9);
      if (is_nan_e4m3(static_cast<uint8_t>(code))) x = std::nanf("");
      all[code] = code & 128 ? -x : x;
    }
    return all;
  }();
  return values;
}

}  // namespace radix::cpu
