// A head of keys or values to INT8, by its largest magnitude.
#pragma once

#include <cstring>

#include "cpu/simd.h"

namespace radix::cpu::RK_ISA {

// x [n] of T, finite: out = round(x / scale) to nearest even with *scale = max |x| / 127, all 0 where that is 0.
template <class T>
inline void quantize_head(const T* x, int64_t n, int8_t* out, float* scale) {
  constexpr int W = Vec::width;
  Vec top = zero();
  int64_t i = 0;
  for (; i + W <= n; i += W) top = max(top, abs(load(x + i)));
  if (i < n) top = max(top, abs(load(x + i, static_cast<int>(n - i))));
  *scale = reduce_max(top) / 127.f;
  if (*scale == 0) {
    std::memset(out, 0, static_cast<size_t>(n));
    return;
  }
  const Vec divisor = set1(*scale);
  for (i = 0; i < n; i += W) {
    const int count = static_cast<int>(n - i < W ? n - i : W);
    float lanes[W];
    store(lanes, round_nearest((count < W ? load(x + i, count) : load(x + i)) / divisor));
    for (int lane = 0; lane < count; lane++) out[i + lane] = static_cast<int8_t>(lanes[lane]);
  }
}

}  // namespace radix::cpu::RK_ISA
