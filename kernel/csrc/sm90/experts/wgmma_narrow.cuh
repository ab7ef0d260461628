// Warpgroup products with A in registers (common/wgmma_registers.cuh) for 16 and 32 columns, B as in wgmma.cuh.
#pragma once

#include "sm90/common/wgmma_registers.cuh"

namespace radix::sm90 {

#define RK_WGMMA_RUN(columns, types, count, a0, a1, a2, a3, b_, p_)                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_                                       \
               ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." types " {" RK_D##count \
               "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_ ", p, 1, 1, 0;\n}"        \
               : RK_O##count(d)                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define RK_WGMMA(columns, count, a0, a1, a2, a3, b_, p_)                                           \
  template <Operand kType>                                                                         \
  struct WgmmaRegisters<kType, columns, false> {                                                   \
    static __device__ void run(float (&d)[count], const uint32_t* a, uint64_t b, int accumulate) { \
      if constexpr (kType == Operand::bf16) {                                                      \
        RK_WGMMA_RUN(columns, "bf16.bf16", count, a0, a1, a2, a3, b_, p_);                         \
      } else {                                                                                     \
        RK_WGMMA_RUN(columns, "f16.f16", count, a0, a1, a2, a3, b_, p_);                           \
      }                                                                                            \
    }                                                                                              \
  };
RK_WGMMA(16, 8, 8, 9, 10, 11, 12, 13)
RK_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
#undef RK_WGMMA
#undef RK_WGMMA_RUN

}  // namespace radix::sm90
