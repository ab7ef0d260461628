#include "sm90/gemm/narrow.cuh"

namespace radix::gemm {

void narrow_f16(const Problem& problem) {
  using sm90::Operand;
  if (problem.m <= 16) return narrow<Operand::f16, f16, 16, false>(problem);
  if (problem.m <= 32) return narrow<Operand::f16, f16, 32, false>(problem);
  narrow<Operand::f16, f16, 64, false>(problem);
}

}  // namespace radix::gemm
