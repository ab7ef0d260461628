#include "sm90/experts/grouped_swap_ab.cuh"

namespace radix::experts {

void grouped_swap_ab_f16_w8a8(const Problem& problem, const Scratch& scratch) {
  grouped_swap_ab<f16, Format::fp8>(problem, scratch);
}

}  // namespace radix::experts
