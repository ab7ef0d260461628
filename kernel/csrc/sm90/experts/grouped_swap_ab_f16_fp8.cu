#include "sm90/experts/grouped_swap_ab.cuh"

namespace radix::experts {

void grouped_swap_ab_f16_fp8(const Problem& problem, const Scratch& scratch) {
  grouped_swap_ab<f16, Format::widened>(problem, scratch);
}

}  // namespace radix::experts
