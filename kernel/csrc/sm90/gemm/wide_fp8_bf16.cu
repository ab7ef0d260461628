#include "sm90/gemm/wide.cuh"

namespace radix::gemm {

void wide_fp8_bf16(const Problem& problem) {
  wide_fp8<bf16>(problem);
}

}  // namespace radix::gemm
