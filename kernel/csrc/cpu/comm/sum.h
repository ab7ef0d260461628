// The sum over ranks, for one ISA level.
#pragma once

#include "common/dtype.h"
#include "cpu/isa.h"

namespace radix::cpu {

struct CommKernels {
  // out[i] = part[0][i] + part[1][i] + ... in that order, elements [0, n); 16-bit types in float32, rounded once.
  // out may be a part.
  void (*sum)(DType dtype, const void* const* parts, int count, void* out, int64_t n);
};
RK_CPU_TABLE(CommKernels, comm)

}  // namespace radix::cpu
