#include "sm90/gemm/skinny.cuh"

namespace radix::gemm {

void skinny_bf16(const Problem& problem) {
  skinny<HalfMma<bf16>>(problem);
}

}  // namespace radix::gemm
