#include "sm90/experts/many.cuh"

namespace radix::experts {

void many_bf16_fp8(const Problem& problem, const Scratch& scratch) {
  many<bf16, Format::widened>(problem, scratch);
}

}  // namespace radix::experts
