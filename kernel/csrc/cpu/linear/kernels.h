// The linear kernels of one ISA level.
#pragma once

#include "cpu/isa.h"
#include "radix_kernels/linear.h"

namespace radix::cpu {

struct LinearKernels {
  void (*linear)(const rk_linear_args& args);
};

RK_CPU_TABLE(LinearKernels, linear)

}  // namespace radix::cpu
