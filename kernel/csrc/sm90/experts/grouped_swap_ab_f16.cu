#include "sm90/experts/m_grouped_gemm.cuh"

namespace radix::experts {

void grouped_swap_ab_f16(const Problem& problem, const Scratch& scratch) {
  grouped_swap_ab<f16, Format::half>(problem, scratch);
}

void grouped_f16(const Grouped& g) {
  grouped<f16, Format::half>(g);
}

}  // namespace radix::experts
