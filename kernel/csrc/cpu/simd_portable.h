// Vec in plain loops that any compiler can vectorise for its baseline.
#pragma once

#include <cmath>

#include "cpu/simd_scalar.h"

namespace radix::cpu::RK_ISA {

struct Vec {
  static constexpr int width = 8;
  float v[width];
};
struct Mask {
  bool m[Vec::width];
};

template <class Fn>
inline Vec each(const Fn& fn) {
  Vec r;
  for (int i = 0; i < Vec::width; i++) r.v[i] = fn(i);
  return r;
}

inline Vec set1(float x) {
  return each([&](int) { return x; });
}
inline Vec zero() {
  return set1(0.f);
}

template <class T>
inline Vec load(const T* p) {
  return each([&](int i) { return to_float(p[i]); });
}
template <class T>
inline Vec load(const T* p, int n) {
  return each([&](int i) { return i < n ? to_float(p[i]) : 0.f; });
}
template <class T>
inline void store(T* p, Vec a) {
  for (int i = 0; i < Vec::width; i++) from_float(a.v[i], p[i]);
}
template <class T>
inline void store(T* p, Vec a, int n) {
  for (int i = 0; i < n; i++) from_float(a.v[i], p[i]);
}

inline Vec operator+(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec operator-(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator*(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec operator/(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return a * b + c;
}
inline Vec fnma(Vec a, Vec b, Vec c) {
  return c - a * b;
}
inline Vec max(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec abs(Vec a) {
  return each([&](int i) { return std::fabs(a.v[i]); });
}
inline Vec copysign(Vec magnitude, Vec sign) {
  return each([&](int i) { return std::copysign(magnitude.v[i], sign.v[i]); });
}
inline Vec round_nearest(Vec a) {
  return each([&](int i) { return std::nearbyintf(a.v[i]); });
}
// n within [-252, 254]; two factors, so that results in the subnormal range come out rounded.
inline Vec scale2(Vec a, Vec n) {
  return each([&](int i) {
    const int k = static_cast<int>(n.v[i]), half = k >> 1;
    return a.v[i] * float_of(static_cast<uint32_t>(half + 127) << 23) *
           float_of(static_cast<uint32_t>(k - half + 127) << 23);
  });
}
// Swaps lanes 2i and 2i + 1.
inline Vec swap_pairs(Vec a) {
  return each([&](int i) { return a.v[i ^ 1]; });
}
inline Mask lt(Vec a, Vec b) {
  Mask r;
  for (int i = 0; i < Vec::width; i++) r.m[i] = a.v[i] < b.v[i];
  return r;
}
inline Mask bit_mask(uint32_t bits) {
  Mask r;
  for (int i = 0; i < Vec::width; i++) r.m[i] = bits >> i & 1u;
  return r;
}
inline Vec select(Mask m, Vec a, Vec b) {
  return each([&](int i) { return m.m[i] ? a.v[i] : b.v[i]; });
}

inline float reduce_sum(Vec a) {
  return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
// out[0..3]: the sums of a, b, c and d.
inline void store_sums(float* out, Vec a, Vec b, Vec c, Vec d) {
  out[0] = reduce_sum(a);
  out[1] = reduce_sum(b);
  out[2] = reduce_sum(c);
  out[3] = reduce_sum(d);
}
inline float reduce_max(Vec a) {
  float r = a.v[0];
  for (int i = 1; i < Vec::width; i++) r = r > a.v[i] ? r : a.v[i];
  return r;
}

}  // namespace radix::cpu::RK_ISA
