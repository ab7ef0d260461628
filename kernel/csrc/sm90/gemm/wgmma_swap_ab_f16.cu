#include "sm90/gemm/wgmma_swap_ab.cuh"

namespace radix::gemm {

void wgmma_swap_ab_f16(const Problem& problem) {
  using sm90::Operand;
  if (problem.m <= 16) return wgmma_swap_ab<Operand::f16, f16, 16, false>(problem);
  if (problem.m <= 32) return wgmma_swap_ab<Operand::f16, f16, 32, false>(problem);
  wgmma_swap_ab<Operand::f16, f16, 64, false>(problem);
}

}  // namespace radix::gemm
