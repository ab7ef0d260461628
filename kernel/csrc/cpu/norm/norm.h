// CPU norm family: what the backend (norm.cpp, compiled once) hands to the kernels (rmsnorm.cpp, once per ISA level).
#pragma once

#include "common/tensor.h"
#include "cpu/isa.h"

namespace radix::cpu {

struct RmsnormTask {
  Rows input, out;
  const void* weight;
  int64_t hidden;
  DType dtype, weight_dtype;
  float eps;
};

struct FusedAddRmsnormTask {
  Rows input, residual;
  const void* weight;
  int64_t hidden;
  DType dtype, weight_dtype;
  float eps;
};

struct NormKernels {
  void (*rmsnorm)(const RmsnormTask& task, int64_t begin, int64_t end);
  void (*fused_add_rmsnorm)(const FusedAddRmsnormTask& task, int64_t begin, int64_t end);
};
RK_CPU_TABLE(NormKernels, norm)

}  // namespace radix::cpu
