#include "sm90/experts/few.cuh"

namespace radix::experts {

void few_bf16(const Problem& problem) {
  few<bf16, bf16>(problem);
}
void few_bf16_fp8(const Problem& problem) {
  few<bf16, e4m3>(problem);
}

}  // namespace radix::experts
