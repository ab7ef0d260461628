// CPU decoder family: what the backend (sum.cpp, scale.cpp) hands to the kernels (add.cpp, once per ISA level).
#pragma once

#include "common/tensor.h"
#include "cpu/isa.h"

namespace radix::cpu {

struct DecoderKernels {
  // Elements [begin, end) of to += x.
  void (*add)(DType dtype, void* to, const void* x, int64_t begin, int64_t end);
  // n elements: to += x * scale.
  void (*add_scaled)(DType dtype, void* to, const void* x, float scale, int64_t n);
  // n elements: x *= factor.
  void (*scale)(DType dtype, void* x, float factor, int64_t n);
};
RK_CPU_TABLE(DecoderKernels, decoder)

}  // namespace radix::cpu
