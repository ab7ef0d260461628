#include "sm90/gemm/mma_m16.cuh"

namespace radix::gemm {

void mma_m16_f16(const Problem& problem) {
  mma_m16<HalfMma<f16>>(problem);
}

}  // namespace radix::gemm
