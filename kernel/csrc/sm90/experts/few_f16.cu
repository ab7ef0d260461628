#include "sm90/experts/few.cuh"

namespace radix::experts {

void few_f16(const Problem& problem) {
  few<f16, f16>(problem);
}
void few_f16_fp8(const Problem& problem) {
  few<f16, e4m3>(problem);
}

}  // namespace radix::experts
