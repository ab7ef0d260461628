#include "sm90/gemm/wgmma_persistent.cuh"

namespace radix::gemm {

void wgmma_persistent_fp8_bf16(const Problem& problem) {
  wgmma_persistent_fp8<bf16>(problem);
}

}  // namespace radix::gemm
