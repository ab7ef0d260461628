#include "sm90/experts/many.cuh"

namespace radix::experts {

void many_f16_fp8(const Problem& problem, const Scratch& scratch) {
  many<f16, Format::widened>(problem, scratch);
}

}  // namespace radix::experts
