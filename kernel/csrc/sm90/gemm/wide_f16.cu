#include "cuda/gemm/wide.h"

namespace radix::gemm {

void wide_f16(const Problem& problem) {
  wide_halves<hopper::Operand::f16, f16>(problem);
}

}  // namespace radix::gemm
