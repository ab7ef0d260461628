#include "sm90/experts/m_grouped_gemm.cuh"

namespace radix::experts {

void grouped_swap_ab_bf16_w8a8(const Problem& problem, const Scratch& scratch) {
  grouped_swap_ab<bf16, Format::fp8>(problem, scratch);
}

void grouped_fp8(const Grouped& g) {
  grouped<bf16, Format::fp8>(g);
}

}  // namespace radix::experts
