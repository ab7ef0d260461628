// The linear kernels of one ISA level.
#pragma once

#include "cpu/isa.h"
#include "radix_kernels/linear.h"

namespace radix::cpu {

struct LinearKernels {
  void (*dense)(const rk_linear_args& args);
  void (*quantized)(const rk_linear_args& args);
  void (*pack_quantized)(const rk_pack_weight_args& args);
  void (*unpack_quantized)(const rk_unpack_weight_args& args);
  void (*gather_quantized)(const rk_embedding_args& args);
};

RK_CPU_TABLE(LinearKernels, linear)

}  // namespace radix::cpu
