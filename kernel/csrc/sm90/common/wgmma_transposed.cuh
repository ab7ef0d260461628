// Warpgroup products of 16-bit operands in shared memory, one of which does not run along k: d[64, N] += a b with
// a [64, 16] and b [16, N]. The operand that runs along rows or columns (transposed_operand of wgmma_registers.cuh) has
// a row of 128 bytes for each of its k; the other one is K-major as in wgmma.cuh.
#pragma once

#include "sm90/common/wgmma_registers.cuh"

namespace radix::sm90 {

enum class Transposed { a, b };

#define RK_WGMMA_RUN(columns, types, count, a_, b_, transposed)                                                      \
  asm volatile(                                                                                                      \
      "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                                                     \
      "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." types " {" RK_D##count "}, %" #a_ ", %" #b_            \
                                                                                     ", p, 1, 1, " transposed ";\n}" \
      : RK_O##count("+f", d)                                                                                         \
      : "l"(a), "l"(b))

template <Operand kType, int kColumns, Transposed kTurned>
struct WgmmaTransposed;
#define RK_WGMMA(columns, count, a_, b_, operand, transposed)               \
  template <Operand kType>                                                  \
  struct WgmmaTransposed<kType, columns, Transposed::operand> {             \
    static __device__ void run(float (&d)[count], uint64_t a, uint64_t b) { \
      if constexpr (kType == Operand::bf16) {                               \
        RK_WGMMA_RUN(columns, "bf16.bf16", count, a_, b_, transposed);      \
      } else {                                                              \
        RK_WGMMA_RUN(columns, "f16.f16", count, a_, b_, transposed);        \
      }                                                                     \
    }                                                                       \
  };
RK_WGMMA(16, 8, 8, 9, a, "1, 0")
RK_WGMMA(128, 64, 64, 65, b, "0, 1")
#undef RK_WGMMA
#undef RK_WGMMA_RUN

}  // namespace radix::sm90
