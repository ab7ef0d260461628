#include "sm90/gemm/mma_m16.cuh"

namespace radix::gemm {

void mma_m16_bf16(const Problem& problem) {
  mma_m16<HalfMma<bf16>>(problem);
}

}  // namespace radix::gemm
