#include "sm90/experts/grouped_mma_m16.cuh"

namespace radix::experts {

void grouped_mma_m16_bf16(const Problem& problem) {
  grouped_mma_m16<bf16, bf16>(problem);
}
void grouped_mma_m16_bf16_fp8(const Problem& problem) {
  grouped_mma_m16<bf16, e4m3>(problem);
}

}  // namespace radix::experts
