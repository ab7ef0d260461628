// Warpgroup products whose A lies in registers: d[64, N] += a[64, K] * b with K of 32 bytes. B is K-major as in
// wgmma.cuh, or, 16-bit operands only, runs along its columns: b[16, N]. The second product of attention: a =
// probabilities, b = values, one row of shared memory a token.
//
// A: thread 4 g + t of warp w holds a[0] row g, columns 2 t, + 1; a[1] row g + 8; a[2], a[3] the same 8 columns further
// on (rows of the warp's 16). So the rounded accumulators of columns 16 k to 16 k + 15 of one product are, in their
// order, the A of step k of the next. Of 8-bit operands a word holds columns 4 t to 4 t + 3, and a[2], a[3] those 16
// further on. Registers of a pending product must not be written.
#pragma once

#include "sm90/common/wgmma.cuh"

namespace radix::sm90 {

// Describes such a B: rows (one a step of k) of 128 bytes in the 128-byte swizzle, 64 columns a block; `block_bytes`
// from one block of 64 columns to the next. 16 rows further on is 2,048 bytes.
__device__ inline uint64_t transposed_operand(const void* p, int block_bytes) {
  constexpr uint64_t kAtomStep = 1024 >> 4, kSwizzle128 = 1;
  return (shared_address(p) & 0x3ffff) >> 4 | static_cast<uint64_t>(block_bytes >> 4) << 16 | kAtomStep << 32 |
         kSwizzle128 << 62;
}
// The operand `bytes` further on.
__device__ inline uint64_t advanced(uint64_t operand, int bytes) {
  return operand + (bytes >> 4);
}

#define RK_WGMMA_RUN(columns, types, count, a0, a1, a2, a3, b_, p_, trans)                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_                                      \
               ", 0;\n"                                                                      \
               "wgmma.mma_async.sync.aligned.m64n" #columns types " {" RK_D##count           \
               "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_ ", p, 1, 1" trans ";\n}" \
               : RK_O##count("+f", d)                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

// d = a * b, or d += with accumulate. kTransposed: B as above, else as in wgmma.cuh. a: four registers.
template <Operand kType, int kColumns, bool kTransposed = true>
struct WgmmaRegisters;
#define RK_WGMMA(columns, count, a0, a1, a2, a3, b_, p_)                                           \
  template <Operand kType, bool kTransposed>                                                       \
  struct WgmmaRegisters<kType, columns, kTransposed> {                                             \
    static __device__ void run(float (&d)[count], const uint32_t* a, uint64_t b, int accumulate) { \
      if constexpr (kType == Operand::bf16 && kTransposed) {                                       \
        RK_WGMMA_RUN(columns, "k16.f32.bf16.bf16", count, a0, a1, a2, a3, b_, p_, ", 1");          \
      } else if constexpr (kType == Operand::bf16) {                                               \
        RK_WGMMA_RUN(columns, "k16.f32.bf16.bf16", count, a0, a1, a2, a3, b_, p_, ", 0");          \
      } else if constexpr (kType == Operand::e4m3) {                                               \
        static_assert(!kTransposed);                                                               \
        RK_WGMMA_RUN(columns, "k32.f32.e4m3.e4m3", count, a0, a1, a2, a3, b_, p_, "");             \
      } else if constexpr (kTransposed) {                                                          \
        RK_WGMMA_RUN(columns, "k16.f32.f16.f16", count, a0, a1, a2, a3, b_, p_, ", 1");            \
      } else {                                                                                     \
        RK_WGMMA_RUN(columns, "k16.f32.f16.f16", count, a0, a1, a2, a3, b_, p_, ", 0");            \
      }                                                                                            \
    }                                                                                              \
  };
RK_WGMMA(16, 8, 8, 9, 10, 11, 12, 13)
RK_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
RK_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
RK_WGMMA(80, 40, 40, 41, 42, 43, 44, 45)
RK_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
RK_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
RK_WGMMA(160, 80, 80, 81, 82, 83, 84, 85)
RK_WGMMA(176, 88, 88, 89, 90, 91, 92, 93)
RK_WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
RK_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)
#undef RK_WGMMA
#undef RK_WGMMA_RUN

}  // namespace radix::sm90
