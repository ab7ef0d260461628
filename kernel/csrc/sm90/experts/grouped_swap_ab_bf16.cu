#include "sm90/experts/m_grouped_gemm.cuh"

namespace radix::experts {

void grouped_swap_ab_bf16(const Problem& problem, const Scratch& scratch) {
  grouped_swap_ab<bf16, Format::half>(problem, scratch);
}

void grouped_bf16(const Grouped& g) {
  grouped<bf16, Format::half>(g);
}

}  // namespace radix::experts
