#include "sm90/gemm/wide.cuh"

namespace radix::gemm {

void wide_f16(const Problem& problem) {
  wide_halves<sm90::Operand::f16, f16>(problem);
}

}  // namespace radix::gemm
