#include "sm90/experts/many.cuh"

namespace radix::experts {

void many_f16_w8a8(const Problem& problem, const Scratch& scratch) {
  many<f16, Format::fp8>(problem, scratch);
}

}  // namespace radix::experts
