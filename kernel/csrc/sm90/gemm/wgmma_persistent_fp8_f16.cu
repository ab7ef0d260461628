#include "sm90/gemm/wgmma_persistent.cuh"

namespace radix::gemm {

void wgmma_persistent_fp8_f16(const Problem& problem) {
  wgmma_persistent_fp8<f16>(problem);
}

}  // namespace radix::gemm
