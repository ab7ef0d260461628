// Vector instructions on float and half.
#include "lanes.h"

namespace gcn {
namespace {

// Of a number and a NaN the number; +0 is larger than -0.
template <class T, class Bits>
T larger(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return std::bit_cast<T>(static_cast<Bits>(std::bit_cast<Bits>(a) & std::bit_cast<Bits>(b)));
  return a > b ? a : b;
}
template <class T, class Bits>
T smaller(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return std::bit_cast<T>(static_cast<Bits>(std::bit_cast<Bits>(a) | std::bit_cast<Bits>(b)));
  return a < b ? a : b;
}
inline float max32(float a, float b) {
  return larger<float, u32>(a, b);
}
inline float min32(float a, float b) {
  return smaller<float, u32>(a, b);
}

// The middle one: without NaN. With one it is the smallest of the numbers.
float median(float a, float b, float c) {
  if (a != a || b != b || c != c) return min32(min32(a, b), c);
  return max32(min32(a, b), min32(max32(a, b), c));
}

u32 to_u32(float x) {
  if (!(x > 0)) return 0;
  return x >= 4294967296.0f ? ~0u : static_cast<u32>(x);
}
i32 to_i32(float x) {
  if (x != x) return 0;
  if (x >= 2147483648.0f) return INT32_MAX;
  return x < -2147483648.0f ? INT32_MIN : static_cast<i32>(x);
}

// Zero, a NaN or an infinity stays itself.
float mantissa(float x) {
  int exponent;
  return std::isfinite(x) ? std::frexp(x, &exponent) : x;
}
i32 exponent(float x) {
  int e = 0;
  if (std::isfinite(x)) (void)std::frexp(x, &e);
  return e;
}

int biased(float x) {
  return std::bit_cast<u32>(x) >> 23 & 255;
}
bool tiny(float x) {
  return x != 0 && biased(x) == 0;
}

struct Scaled {
  float value;
  bool flag;
};

// Division's first step: brings quotient, denominator or numerator to where the refinement neither overflows nor loses
// bits. `x` is one of the other two.
Scaled scale_for_division(float x, float denominator, float numerator) {
  const bool is_denominator = std::bit_cast<u32>(x) == std::bit_cast<u32>(denominator);
  const bool is_numerator = std::bit_cast<u32>(x) == std::bit_cast<u32>(numerator);
  const float up = 0x1p64f, down = 0x1p-64f;
  const bool reciprocal_tiny = tiny(1 / denominator), quotient_tiny = tiny(numerator / denominator);
  if (numerator == 0 || denominator == 0) return {NAN, false};
  if (biased(numerator) - biased(denominator) >= 96) return {is_denominator ? x * up : x, true};
  if (tiny(denominator)) return {x * up, false};
  if (reciprocal_tiny && quotient_tiny) return {is_denominator ? x * down : x, true};
  if (reciprocal_tiny) return {x * down, false};
  if (quotient_tiny) return {is_numerator ? x * up : x, true};
  if (biased(numerator) <= 23) return {x * up, false};
  return {x, false};
}

// v_div_scale_f32 v0, vcc, x, denominator, numerator
void divide_scale(Wave& w, const Instruction& in) {
  const Source<float> x(w, in.op[2]), d(w, in.op[3]), n(w, in.op[4]);
  float out[kLanes];
  u64 flags = 0;
  u32 special = 0;
  for (unsigned l = 0; l < kLanes; l++) {
    const int e = std::bit_cast<u32>(d[l]) >> 23 & 255, f = std::bit_cast<u32>(n[l]) >> 23 & 255;
    special |= (e < 2) | (e > 250) | (f <= 23) | (f - e >= 96) | (f - e <= -124);
    out[l] = x[l];
  }
  for (unsigned l = 0; special && l < kLanes; l++) {
    const Scaled scaled = scale_for_division(x[l], d[l], n[l]);
    out[l] = scaled.value;
    flags |= u64{scaled.flag} << l;
  }
  set_lanes(w, in.op[0], out);
  w.set_scalar_pair(in.op[1], flags & w.exec());
}

// The refinement's last step undoes the scaling, in the direction that the quotient's size tells.
void divide_fmas(Wave& w, const Instruction& in) {
  const Source<float> a(w, in.op[1]), b(w, in.op[2]), c(w, in.op[3]);
  const u64 flags = w.s[kVcc] | u64{w.s[kVcc + 1]} << 32;
  float out[kLanes];
  for (unsigned l = 0; l < kLanes; l++) out[l] = __builtin_fmaf(a[l], b[l], c[l]);
  for (unsigned l = 0; flags && l < kLanes; l++)
    if (flags >> l & 1) out[l] *= biased(c[l]) > 127 ? 0x1p64f : 0x1p-64f;
  set_lanes(w, in.op[0], out);
}

// Division's last word: NaN, infinity and zero as IEEE has them.
float fix_division(float quotient, float denominator, float numerator) {
  const float sign = std::signbit(numerator) != std::signbit(denominator) ? -1.0f : 1.0f;
  if (numerator != numerator) return numerator;
  if (denominator != denominator) return denominator;
  const bool endless = std::isinf(numerator), over_endless = std::isinf(denominator);
  if ((numerator == 0 && denominator == 0) || (endless && over_endless)) return std::bit_cast<float>(0xffc00000u);
  if (denominator == 0 || endless) return sign * INFINITY;
  if (over_endless || numerator == 0) return sign * 0.0f;
  if (biased(numerator) - biased(denominator) < -150) return sign * 0.0f;
  if (!std::isfinite(quotient)) return sign * INFINITY;  // too large: inf - inf in the refinement is a NaN
  return std::copysign(quotient, sign);
}

void add_arithmetic(Table& t) {
  const Entry entries[] = {
      {"v_add_f32", lanes<[](float a, float b) { return a + b; }>},
      {"v_sub_f32", lanes<[](float a, float b) { return a - b; }>},
      {"v_subrev_f32", lanes<[](float a, float b) { return b - a; }>},
      {"v_mul_f32", lanes<[](float a, float b) { return a * b; }>},
      {"v_mul_legacy_f32", lanes<[](float a, float b) { return a == 0 || b == 0 ? 0.0f : a * b; }>},
      {"v_fma_f32", lanes<[](float a, float b, float c) { return __builtin_fmaf(a, b, c); }>},
      {"v_fmaak_f32", lanes<[](float a, float b, float c) { return __builtin_fmaf(a, b, c); }>},
      {"v_fmamk_f32", lanes<[](float a, float b, float c) { return __builtin_fmaf(a, b, c); }>},
      {"v_fmac_f32", lanes_onto<[](float a, float b, float c) { return __builtin_fmaf(a, b, c); }>},
      {"v_mac_f32", lanes_onto<[](float a, float b, float c) { return a * b + c; }>},
      {"v_mad_f32", lanes<[](float a, float b, float c) { return a * b + c; }>},
      {"v_max_f32", lanes<[](float a, float b) { return max32(a, b); }>},
      {"v_min_f32", lanes<[](float a, float b) { return min32(a, b); }>},
      {"v_max3_f32", lanes<[](float a, float b, float c) { return max32(max32(a, b), c); }>},
      {"v_min3_f32", lanes<[](float a, float b, float c) { return min32(min32(a, b), c); }>},
      {"v_med3_f32", lanes<[](float a, float b, float c) { return median(a, b, c); }>},
      {"v_div_scale_f32", divide_scale},
      {"v_div_fmas_f32", divide_fmas},
      {"v_div_fixup_f32", lanes<[](float q, float d, float n) { return fix_division(q, d, n); }>},
      {"v_add_f16", lanes<[](half a, half b) { return static_cast<half>(a + b); }>},
      {"v_sub_f16", lanes<[](half a, half b) { return static_cast<half>(a - b); }>},
      {"v_mul_f16", lanes<[](half a, half b) { return static_cast<half>(a * b); }>},
      {"v_max_f16", lanes<[](half a, half b) { return larger<half, uint16_t>(a, b); }>},
      {"v_min_f16", lanes<[](half a, half b) { return smaller<half, uint16_t>(a, b); }>},
      {"v_fma_f16", lanes<[](half a, half b, half c) {
         return static_cast<half>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
       }>},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

void add_functions(Table& t) {
  const Entry entries[] = {
      {"v_rcp_f32", lanes<[](float a) { return 1 / a; }>},
      {"v_rcp_iflag_f32", lanes<[](float a) { return 1 / a; }>},
      {"v_rsq_f32", lanes<[](float a) { return static_cast<float>(1 / std::sqrt(static_cast<double>(a))); }>},
      {"v_sqrt_f32", lanes<[](float a) { return __builtin_sqrtf(a); }>},
      {"v_exp_f32", lanes<[](float a) { return exp2f(a); }>},
      {"v_log_f32", lanes<[](float a) { return log2f(a); }>},
      {"v_sin_f32", lanes<[](float a) { return static_cast<float>(std::sin(2 * M_PI * a)); }>},
      {"v_cos_f32", lanes<[](float a) { return static_cast<float>(std::cos(2 * M_PI * a)); }>},
      {"v_floor_f32", lanes<[](float a) { return __builtin_floorf(a); }>},
      {"v_ceil_f32", lanes<[](float a) { return __builtin_ceilf(a); }>},
      {"v_trunc_f32", lanes<[](float a) { return __builtin_truncf(a); }>},
      {"v_rndne_f32", lanes<[](float a) { return __builtin_rintf(a); }>},
      {"v_fract_f32", lanes<[](float a) { return std::min(a - __builtin_floorf(a), 0x1.fffffep-1f); }>},
      {"v_ldexp_f32", lanes<[](float a, i32 e) { return std::ldexp(a, std::clamp(e, -400, 400)); }>},
      {"v_frexp_mant_f32", lanes<[](float a) { return mantissa(a); }>},
      {"v_frexp_exp_i32_f32", lanes<[](float a) { return exponent(a); }>},
      {"v_cvt_f32_i32", lanes<[](i32 a) { return static_cast<float>(a); }>},
      {"v_cvt_f32_u32", lanes<[](u32 a) { return static_cast<float>(a); }>},
      {"v_cvt_u32_f32", lanes<[](float a) { return to_u32(a); }>},
      {"v_cvt_i32_f32", lanes<[](float a) { return to_i32(a); }>},
      {"v_cvt_f32_f16", lanes<[](half a) { return static_cast<float>(a); }>},
      {"v_cvt_f16_f32", lanes<[](float a) { return static_cast<half>(a); }>},
      {"v_cvt_f32_ubyte0", lanes<[](u32 a) { return static_cast<float>(a & 255); }>},
      {"v_cvt_f32_ubyte1", lanes<[](u32 a) { return (static_cast<float>(a >> 8 & 255)); }>},
      {"v_cvt_f32_ubyte2", lanes<[](u32 a) { return (static_cast<float>(a >> 16 & 255)); }>},
      {"v_cvt_f32_ubyte3", lanes<[](u32 a) { return (static_cast<float>(a >> 24)); }>},
      {"v_rcp_f16", lanes<[](half a) { return static_cast<half>(1.0f / static_cast<float>(a)); }>},
      {"v_sqrt_f16", lanes<[](half a) { return static_cast<half>(__builtin_sqrtf(static_cast<float>(a))); }>},
      {"v_exp_f16", lanes<[](half a) { return static_cast<half>(exp2f(static_cast<float>(a))); }>},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

}  // namespace

void add_float(Table& table) {
  add_arithmetic(table);
  add_functions(table);
}

}  // namespace gcn
