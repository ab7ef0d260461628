// CPU layernorm: what the backend (layernorm.cpp, compiled once) hands to the kernel (rows.cpp, once per ISA level).
#pragma once

#include "common/tensor.h"
#include "cpu/isa.h"

namespace radix::cpu {

// A weight or a bias of a row; data NULL: none.
struct RowTensor {
  const void* data;
  DType dtype;
};

struct LayernormTask {
  Rows input, out;
  RowTensor weight, bias;
  int64_t hidden;
  DType dtype;
  float eps;
};

struct LayernormKernels {
  void (*rows)(const LayernormTask& task, int64_t begin, int64_t end);
};
RK_CPU_TABLE(LayernormKernels, layernorm)

}  // namespace radix::cpu
