#include "sm90/gemm/skinny.cuh"

namespace radix::gemm {

void skinny_f16(const Problem& problem) {
  skinny<HalfMma<f16>>(problem);
}

}  // namespace radix::gemm
