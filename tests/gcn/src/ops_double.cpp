// Vector instructions on double.
#include "lanes.h"

namespace gcn {
namespace {

int biased(double x) {
  return static_cast<int>(std::bit_cast<u64>(x) >> 52 & 2047);
}
bool tiny(double x) {
  return x != 0 && biased(x) == 0;
}

struct Scaled {
  double value;
  bool flag;
};

// As of float, in double's range.
Scaled scale_for_division(double x, double denominator, double numerator) {
  const bool is_denominator = std::bit_cast<u64>(x) == std::bit_cast<u64>(denominator);
  const bool is_numerator = std::bit_cast<u64>(x) == std::bit_cast<u64>(numerator);
  const double up = 0x1p128, down = 0x1p-128;
  const bool reciprocal_tiny = tiny(1 / denominator), quotient_tiny = tiny(numerator / denominator);
  if (numerator == 0 || denominator == 0) return {NAN, false};
  if (biased(numerator) - biased(denominator) >= 768) return {is_denominator ? x * up : x, true};
  if (tiny(denominator)) return {x * up, false};
  if (reciprocal_tiny && quotient_tiny) return {is_denominator ? x * down : x, true};
  if (reciprocal_tiny) return {x * down, false};
  if (quotient_tiny) return {is_numerator ? x * up : x, true};
  if (biased(numerator) <= 53) return {x * up, false};
  return {x, false};
}

void divide_scale(Wave& w, const Instruction& in) {
  const Source<double> x(w, in.op[2]), d(w, in.op[3]), n(w, in.op[4]);
  double out[kLanes];
  u64 flags = 0;
  for (unsigned l = 0; l < kLanes; l++) {
    const Scaled scaled = scale_for_division(x[l], d[l], n[l]);
    out[l] = scaled.value;
    flags |= u64{scaled.flag} << l;
  }
  set_lanes(w, in.op[0], out);
  w.set_scalar_pair(in.op[1], flags & w.exec());
}

void divide_fmas(Wave& w, const Instruction& in) {
  const Source<double> a(w, in.op[1]), b(w, in.op[2]), c(w, in.op[3]);
  const u64 flags = w.s[kVcc] | u64{w.s[kVcc + 1]} << 32;
  double out[kLanes];
  for (unsigned l = 0; l < kLanes; l++) {
    out[l] = __builtin_fma(a[l], b[l], c[l]);
    if (flags >> l & 1) out[l] *= biased(c[l]) > 1023 ? 0x1p128 : 0x1p-128;
  }
  set_lanes(w, in.op[0], out);
}

double fix_division(double quotient, double denominator, double numerator) {
  const bool special = !std::isfinite(numerator) || !std::isfinite(denominator) || numerator == 0 || denominator == 0;
  if (special) return numerator / denominator;
  const double sign = std::signbit(numerator) != std::signbit(denominator) ? -1.0 : 1.0;
  if (biased(numerator) - biased(denominator) < -1075) return sign * 0.0;
  if (!std::isfinite(quotient)) return sign * INFINITY;
  return std::copysign(quotient, sign);
}

double mantissa(double x) {
  int exponent;
  return std::isfinite(x) ? std::frexp(x, &exponent) : x;
}
i32 exponent(double x) {
  int e = 0;
  if (std::isfinite(x)) (void)std::frexp(x, &e);
  return e;
}

i32 to_i32(double x) {
  if (x != x) return 0;
  return static_cast<i32>(std::clamp(x, -2147483648.0, 2147483647.0));
}
u32 to_u32(double x) {
  return x > 0 ? static_cast<u32>(std::min(x, 4294967295.0)) : 0;
}

}  // namespace

void add_double(Table& t) {
  const Entry entries[] = {
      {"v_add_f64", lanes<[](double a, double b) { return a + b; }>},
      {"v_mul_f64", lanes<[](double a, double b) { return a * b; }>},
      {"v_max_f64", lanes<[](double a, double b) { return std::fmax(a, b); }>},
      {"v_min_f64", lanes<[](double a, double b) { return std::fmin(a, b); }>},
      {"v_fma_f64", lanes<[](double a, double b, double c) { return __builtin_fma(a, b, c); }>},
      {"v_fmac_f64", lanes_onto<[](double a, double b, double c) { return __builtin_fma(a, b, c); }>},
      {"v_rcp_f64", lanes<[](double a) { return 1 / a; }>},
      {"v_rsq_f64", lanes<[](double a) { return 1 / std::sqrt(a); }>},
      {"v_sqrt_f64", lanes<[](double a) { return std::sqrt(a); }>},
      {"v_rndne_f64", lanes<[](double a) { return __builtin_rint(a); }>},
      {"v_trunc_f64", lanes<[](double a) { return __builtin_trunc(a); }>},
      {"v_floor_f64", lanes<[](double a) { return __builtin_floor(a); }>},
      {"v_ceil_f64", lanes<[](double a) { return __builtin_ceil(a); }>},
      {"v_fract_f64", lanes<[](double a) { return std::min(a - __builtin_floor(a), 0x1.fffffffffffffp-1); }>},
      {"v_ldexp_f64", lanes<[](double a, i32 e) { return std::ldexp(a, std::clamp(e, -3000, 3000)); }>},
      {"v_frexp_mant_f64", lanes<[](double a) { return mantissa(a); }>},
      {"v_frexp_exp_i32_f64", lanes<[](double a) { return exponent(a); }>},
      {"v_cvt_f32_f64", lanes<[](double a) { return static_cast<float>(a); }>},
      {"v_cvt_f64_f32", lanes<[](float a) { return static_cast<double>(a); }>},
      {"v_cvt_f64_i32", lanes<[](i32 a) { return static_cast<double>(a); }>},
      {"v_cvt_f64_u32", lanes<[](u32 a) { return static_cast<double>(a); }>},
      {"v_cvt_i32_f64", lanes<[](double a) { return to_i32(a); }>},
      {"v_cvt_u32_f64", lanes<[](double a) { return to_u32(a); }>},
      {"v_div_scale_f64", divide_scale},
      {"v_div_fmas_f64", divide_fmas},
      {"v_div_fixup_f64", lanes<[](double q, double d, double n) { return fix_division(q, d, n); }>},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

}  // namespace gcn
