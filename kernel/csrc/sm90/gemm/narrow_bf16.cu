#include "sm90/gemm/narrow.cuh"

namespace radix::gemm {

void narrow_bf16(const Problem& problem) {
  using sm90::Operand;
  if (problem.m <= 16) return narrow<Operand::bf16, bf16, 16, false>(problem);
  if (problem.m <= 32) return narrow<Operand::bf16, bf16, 32, false>(problem);
  narrow<Operand::bf16, bf16, 64, false>(problem);
}

}  // namespace radix::gemm
