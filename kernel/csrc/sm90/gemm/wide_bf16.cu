#include "cuda/gemm/wide.h"

namespace radix::gemm {

void wide_bf16(const Problem& problem) {
  wide_halves<hopper::Operand::bf16, bf16>(problem);
}

}  // namespace radix::gemm
