// Vec: a register of floats, one implementation an instruction-set level. Kernels are written once against this.
//
//   Vec::width                      floats in a register (portable 8, avx2 8, avx512 and above 16)
//   zero() set1(x)
//   load(p) load(p, n)              from float, bf16 or f16; the lanes past n are 0 and their memory is not read;
//                                   load(p) from int8 too
//   load_apart(p)                   from float; the compiler does not make it a part of a masked instruction
//   store(p, v) store(p, v, n)      rounds to nearest even; NaN stays NaN
//   + - * /  fma(a,b,c) = a*b+c  fnma(a,b,c) = c-a*b      (portable rounds twice in fma: bits differ between levels)
//   max(a,b) min(a,b)               b when either is NaN, on every level
//   abs copysign round_nearest scale2(v, n) = v * 2^n (n integral)
//   swap_pairs(v)                   lanes 2i and 2i + 1
//   lt(a,b), bit_mask(bits) -> Mask, of the low `width` bits; select(mask, a, b) = mask ? a : b
//   reduce_sum(v) reduce_max(v)     in one fixed order a level
//   store_sums(p, a, b, c, d)       p[0..3]: their sums, in another fixed order
//
// Everything is in the level's namespace: a function of one level must never be merged with another's by the linker.
// For the same reason kernel sources use no std containers or algorithms (link order, portable first, backs this up).
#pragma once

#if RK_ISA_LEVEL == 0
#include "cpu/simd_portable.h"
#elif RK_ISA_LEVEL == 1
#include "cpu/simd_avx2.h"
#else
#include "cpu/simd_avx512.h"
#endif

namespace radix::cpu::RK_ISA {

inline Vec load_apart(const float* p) {
  Vec v = load(p);
#if RK_ISA_LEVEL >= 2
  // Memory is read at a third of the rate where selects take it as a masked operand (Zen 4).
  asm("" : "+v"(v.v));
#endif
  return v;
}

// Sum of four independent chains, in the order that the unrolled loops of the kernels use.
inline float reduce_sum(Vec a, Vec b, Vec c, Vec d) {
  return reduce_sum((a + b) + (c + d));
}

}  // namespace radix::cpu::RK_ISA
