// Elementary functions on Vec.
#pragma once

#include "cpu/simd.h"

namespace radix::cpu::RK_ISA {

// e^x to about 1 ulp over the whole range: 0 below -104, inf above 88.73, NaN stays NaN, subnormal results are right.
// x = n ln2 + r with |r| <= ln2/2; e^r is its Taylor polynomial, whose first missing term is r^8/8! < 6e-9.
inline Vec exp(Vec x) {
  const Vec clamped = min(set1(89.f), max(set1(-105.f), x));  // operand order lets NaN through
  const Vec n = round_nearest(clamped * set1(1.44269504088896341f));
  Vec r =
      fnma(n, set1(0x1.62e4p-1f), clamped);  // ln2 in two parts; the first has trailing zeros, so n times it is exact
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

// The normal distribution's Phi(x) = erfc(-x / sqrt 2) / 2, with a small relative error in the lower tail too.
// For z = |x| / sqrt 2: erfc(z) = e^(-z^2) t P(t), t = 1 / (1 + 0.4 z). P is our own least-squares fit of
// e^(z^2) erfc(z) / t in relative error over 0 <= z <= 10.5 (2.5e-8); past that the exponential is 0.
inline Vec normal_cdf(Vec x) {
  const Vec t = set1(1.f) / fma(abs(x), set1(0.282842712474619f), set1(1.f));
  Vec p = set1(-0.029475359246134758f);
  p = fma(p, t, set1(0.1971645951271057f));
  p = fma(p, t, set1(-0.4963195323944092f));
  p = fma(p, t, set1(0.5434263944625854f));
  p = fma(p, t, set1(-0.2804465889930725f));
  p = fma(p, t, set1(0.26964274048805237f));
  p = fma(p, t, set1(0.13062793016433716f));
  p = fma(p, t, set1(0.21469257771968842f));
  p = fma(p, t, set1(0.22498199343681335f));
  p = fma(p, t, set1(0.22570523619651794f));
  const Vec tail = set1(0.5f) * exp(x * x * set1(-0.5f)) * (t * p);
  return select(lt(zero(), x), set1(1.f) - tail, tail);
}

}  // namespace radix::cpu::RK_ISA
