#include "sm90/gemm/wide.cuh"

namespace radix::gemm {

void wide_bf16(const Problem& problem) {
  wide_halves<sm90::Operand::bf16, bf16>(problem);
}

}  // namespace radix::gemm
