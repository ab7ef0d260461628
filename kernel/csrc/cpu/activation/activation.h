// CPU activation family: what the backend (activation.cpp) hands to the kernels (gated.cpp, once per ISA level).
#pragma once

#include "common/tensor.h"
#include "cpu/isa.h"
#include "radix_kernels/activation.h"

namespace radix::cpu {

constexpr int64_t kGatedBlock = 2048;  // columns of one unit of work; a multiple of every vector width

struct GatedTask {
  Rows input, out;
  int64_t width;           // I, columns of out
  int64_t blocks_per_row;  // ceil(I / kGatedBlock)
  DType dtype;
  rk_gating gating;
};

// [begin, end) counts units: unit u is block u % blocks_per_row of row u / blocks_per_row.
using GatedKernel = void (*)(const GatedTask& task, int64_t begin, int64_t end);

struct ActivationKernels {
  GatedKernel gated;
};
RK_CPU_TABLE(ActivationKernels, activation)

// Any activation of checked arguments, split over the pool.
void run_gated(const rk_gated_activation_args& args, const rk_gating& gating);

}  // namespace radix::cpu
