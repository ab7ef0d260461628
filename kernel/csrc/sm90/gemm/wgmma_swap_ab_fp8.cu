#include "sm90/gemm/wgmma_swap_ab.cuh"

namespace radix::gemm {
namespace {

template <class Out, bool kBlockScaled>
void run(const Problem& problem) {
  using sm90::Operand;
  problem.m <= 32 ? wgmma_swap_ab<Operand::e4m3, Out, 32, kBlockScaled>(problem)
                  : wgmma_swap_ab<Operand::e4m3, Out, 64, kBlockScaled>(problem);
}

template <class Out>
void run(const Problem& problem) {
  problem.block_w ? run<Out, true>(problem) : run<Out, false>(problem);
}

}  // namespace

void wgmma_swap_ab_fp8(const Problem& problem) {
  problem.out_type == DType::bf16 ? run<bf16>(problem) : run<f16>(problem);
}

}  // namespace radix::gemm
