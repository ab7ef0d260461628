// 8-bit floats: AMD's "fnuz" formats of gfx942 (no -0, no infinity, 0x80 is NaN) and OCP's of gfx950.
#pragma once

#include <cmath>
#include <cstdint>

namespace gcn {

class Fp8 {
 public:
  constexpr Fp8(int mantissa_bits, bool fnuz) : bits_(mantissa_bits), fnuz_(fnuz) {}

  float decode(uint8_t code) const {
    const int exponent_bits = 7 - bits_;
    const int bias = (1 << (exponent_bits - 1)) - (fnuz_ ? 0 : 1);
    const int exponent = code >> bits_ & ((1 << exponent_bits) - 1), mantissa = code & ((1 << bits_) - 1);
    const float sign = code & 0x80 ? -1.0f : 1.0f;
    if (fnuz_ && code == 0x80) return NAN;
    if (!fnuz_ && (code & 0x7f) > last()) return bits_ == 2 && mantissa == 0 ? sign * INFINITY : NAN;
    const float fraction = static_cast<float>(mantissa) / static_cast<float>(1 << bits_);
    return sign * (exponent ? std::ldexp(1 + fraction, exponent - bias) : std::ldexp(fraction, 1 - bias));
  }

  // To the nearest, ties to even. What is too large is NaN (fnuz, e4m3) or infinity: MODE.FP16_OVFL is 0.
  uint8_t encode(float value) const {
    const uint8_t sign = std::signbit(value) ? 0x80 : 0;
    const float size = std::fabs(value);
    if (std::isnan(value)) return fnuz_ ? 0x80 : static_cast<uint8_t>(sign | 0x7f);
    unsigned low = 0, high = last() + 1;  // codes are in the order of their values
    while (high - low > 1) {
      const unsigned middle = (low + high) / 2;
      (decode(static_cast<uint8_t>(middle)) <= size ? low : high) = middle;
    }
    const double below = decode(static_cast<uint8_t>(low));
    const double step =
        low == last() ? below - decode(static_cast<uint8_t>(low - 1)) : decode(static_cast<uint8_t>(low + 1)) - below;
    const double over = size - below;
    if (over > step / 2 || (over == step / 2 && low % 2)) low++;
    if (low > last()) return fnuz_ ? 0x80 : static_cast<uint8_t>(sign | (bits_ == 2 ? 0x7c : 0x7f));
    return fnuz_ && low == 0 ? 0 : static_cast<uint8_t>(sign | low);
  }

 private:
  unsigned last() const { return fnuz_ ? 0x7f : bits_ == 2 ? 0x7b : 0x7e; }  // the largest number's code
  int bits_;
  bool fnuz_;
};

}  // namespace gcn
