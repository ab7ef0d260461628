// x as int8 codes with a scale: for each row and group of inputs.
#pragma once

#include "cpu/linear/kernel_codes.h"

namespace radix::cpu::RK_ISA {

// Vec::width values of a row from k on, zero from its `size` on.
template <class T>
inline Vec load_at(const T* row, int64_t k, int64_t size) {
  const int64_t left = size - k;
  if (left >= Vec::width) return load(row + k);
  return left > 0 ? load(row + k, static_cast<int>(left)) : zero();
}

// What codes are multiplied by, and what values are multiplied by to become codes. With a NaN or an infinity among the
// values the first is NaN and all codes are 0.
struct XScale {
  float value, inverse;
  bool finite;
};

// Of inputs [begin, end) of a row of `size`.
template <class T>
inline XScale find_scale(const T* row, int64_t begin, int64_t end, int64_t size) {
  constexpr float kLargestCode = 127;
  Vec most = zero(), poison = zero();
  for (int64_t k = begin; k < end; k += Vec::width) {
    const Vec v = load_at(row, k, size);
    most = max(abs(v), most);
    poison = poison + (v - v);
  }
  const float largest = reduce_max(most), bad = reduce_sum(poison);  // bad: 0 or NaN
  const float inverse = largest > 0 && bad == 0 ? kLargestCode / largest : 0;
  const float factor = inverse < 3e38f ? inverse : 0;  // values that are subnormal all count as zero
  return {bad == 0 ? largest / kLargestCode : bad, factor, bad == 0};
}

// Codes of inputs k .. k + 15 of row m, stored; returned too.
template <class T>
inline Ints16 store_codes(const StagedX& x, const T* row, int64_t m, int64_t k, int64_t size, const XScale& scale) {
  int8_t* codes = reinterpret_cast<int8_t*>(x.at(m, k / kLine)) + k % kLine;
  Lanes16 scaled;
  for (int i = 0; i < Lanes16::kParts; i++) {
    const Vec v = load_at(row, k + i * Vec::width, size);
    scaled.part[i] = scale.finite ? v * set1(scale.inverse) : zero();
  }
  return store_rounded(codes, scaled);
}

}  // namespace radix::cpu::RK_ISA
