// Elementary functions on Vec.
#pragma once

#include "cpu/simd.h"

namespace radix::cpu::RK_ISA {

// e^x to about 1 ulp over the whole range: 0 below -104, inf above 88.73, NaN stays NaN, subnormal results are right.
// x = n ln2 + r with |r| <= ln2/2; e^r is its Taylor polynomial, whose first missing term is r^8/8! < 6e-9.
inline Vec exp(Vec x) {
  const Vec clamped = min(set1(89.f), max(set1(-105.f), x));  // operand order lets NaN through
  const Vec n = round_nearest(clamped * set1(1.44269504088896341f));
  Vec r = fnma(n, set1(0x1.62e4p-1f), clamped);  // ln2 in two parts; the first has trailing zeros, so n times it is exact
  r = fnma(n, set1(0x1.7f7d1cp-20f), r);
  Vec p = set1(1.f / 5040);
  p = fma(p, r, set1(1.f / 720));
  p = fma(p, r, set1(1.f / 120));
  p = fma(p, r, set1(1.f / 24));
  p = fma(p, r, set1(1.f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.f));
  p = fma(p, r, set1(1.f));
  return scale2(p, n);
}

// 1 / (1 + e^-x)
inline Vec sigmoid(Vec x) {
  return set1(1.f) / (set1(1.f) + exp(zero() - x));
}

}  // namespace radix::cpu::RK_ISA
