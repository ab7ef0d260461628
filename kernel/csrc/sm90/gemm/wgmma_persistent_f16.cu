#include "sm90/gemm/wgmma_persistent.cuh"

namespace radix::gemm {

void wgmma_persistent_f16(const Problem& problem) {
  wgmma_persistent_16bit<sm90::Operand::f16, f16>(problem);
}

}  // namespace radix::gemm
