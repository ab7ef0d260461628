// Weights of floats to codes: a group's scale, and its codes in rows of bytes. The same results at every ISA level;
// loops over kLanes elements are written so that compilers use vectors.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/dtype.h"
#include "cpu/float8.h"
#include "cpu/linear/layout.h"
#include "cpu/simd_scalar.h"

namespace radix::cpu::RK_ISA {

constexpr int64_t kLanes = 16;
constexpr int64_t kPieceInputs = 512;  // that are widened at a time
static_assert(kPieceInputs % kLanes == 0);

// `count` elements, `step` apart, of a row of weights.
template <class T>
struct WeightRow {
  const T* data;
  int64_t step, count;

  // Elements [begin, begin + size) as floats, and zeros up to a multiple of kLanes.
  void widen(int64_t begin, int64_t size, float* to) const {
    const T* from = data + begin * step;
    if (step == 1) {
      for (int64_t i = 0; i < size; i++) to[i] = to_float(from[i]);
    } else {
      for (int64_t i = 0; i < size; i++) to[i] = to_float(from[i * step]);
    }
    std::fill(to + size, to + linear_layout::round_up(size, kLanes), 0.f);
  }
};

// What a group's scale follows from.
struct Extremes {
  float highest = 0, lowest = 0;  // of all elements and 0
  bool finite = true;

  void see(const float* values, int64_t size) {
    float high[kLanes] = {}, low[kLanes] = {}, poison[kLanes] = {};
    for (int64_t i = 0; i < size; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; lane++) {
        const float value = values[i + lane];
        high[lane] = value > high[lane] ? value : high[lane];
        low[lane] = value < low[lane] ? value : low[lane];
        poison[lane] += value * 0;  // NaN from then on, if it is not finite
      }
    }
    for (int64_t lane = 0; lane < kLanes; lane++) {
      highest = std::max(highest, high[lane]);
      lowest = std::min(lowest, low[lane]);
      if (poison[lane] != 0) finite = false;
    }
  }
};

// Inputs of a row in pieces: fn(first input, how many, their floats).
template <class T, class Fn>
void for_pieces(const WeightRow<T>& row, const Fn& fn) {
  alignas(64) float values[kPieceInputs];
  for (int64_t begin = 0; begin < row.count; begin += kPieceInputs) {
    const int64_t size = std::min(kPieceInputs, row.count - begin);
    row.widen(begin, size, values);
    fn(begin, size, values);
  }
}

// Of the elements that are largest in size the first; 0 if all are 0.
template <class T>
float first_extreme(const WeightRow<T>& row, const Extremes& seen) {
  if (seen.highest != -seen.lowest) return seen.highest > -seen.lowest ? seen.highest : seen.lowest;
  if (seen.highest == 0) return 0;
  for (int64_t i = 0;; i++) {
    const float value = to_float(row.data[i * row.step]);
    if (std::fabs(value) == seen.highest) return value;
  }
}

// Integers from `low` to `high`, plus `zero`: quotients rounded to the nearest, ties to even. `size`: a multiple of
// kLanes.
inline void round_to_codes(const float* values, int64_t size, float scale, int low, int high, int zero,
                           uint8_t* codes) {
  constexpr float kShift = 0x1.8p23f;  // added to a small float it leaves an integer in the lowest bits
  const float least = static_cast<float>(low), most = static_cast<float>(high);
  const uint32_t shifted = bits_of(kShift) - static_cast<uint32_t>(zero);
  for (int64_t i = 0; i < size; i++) {
    float quotient = values[i] / scale;
    quotient = quotient < least ? least : quotient;
    quotient = quotient > most ? most : quotient;
    codes[i] = static_cast<uint8_t>(bits_of(quotient + kShift) - shifted);
  }
}

inline void round_to_float8(const float* values, int64_t size, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < size; i++) codes[i] = to_e4m3(values[i] / scale);
}

}  // namespace radix::cpu::RK_ISA
