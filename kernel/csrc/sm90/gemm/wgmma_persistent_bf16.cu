#include "sm90/gemm/wgmma_persistent.cuh"

namespace radix::gemm {

void wgmma_persistent_bf16(const Problem& problem) {
  wgmma_persistent_16bit<sm90::Operand::bf16, bf16>(problem);
}

}  // namespace radix::gemm
