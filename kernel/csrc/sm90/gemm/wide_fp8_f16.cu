#include "sm90/gemm/wide.cuh"

namespace radix::gemm {

void wide_fp8_f16(const Problem& problem) {
  wide_fp8<f16>(problem);
}

}  // namespace radix::gemm
