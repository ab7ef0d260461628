// merge_state for one ISA level, and the scalar exponential that it shares with flash.cpp.
#pragma once

#include "cpu/simd_math.h"
#include "radix_kernels/attention.h"

namespace radix::cpu::RK_ISA {

inline float exp_scalar(float x) {
  float lanes[Vec::width];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// Rows [begin, end) of T x H.
void merge_state(const rk_merge_state_args& args, int64_t begin, int64_t end);

}  // namespace radix::cpu::RK_ISA
