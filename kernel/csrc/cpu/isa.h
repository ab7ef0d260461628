// The instruction-set levels of the CPU backend, and how a family's kernels are picked among them.
//
// Every kernel source is compiled once per level, inside namespace radix::cpu::<level> (the macro RK_ISA), and exports
// one table of function pointers a family. This header is included by all of them; the choice is made once a process.
#pragma once

namespace radix::cpu {

// portable     what every x86-64 has
// avx2         with FMA and F16C
// avx512       F, BW, DQ, VL; no VNNI, so Ice Lake's goes unused
// avx512_bf16  with VNNI: every CPU that has BF16 has it (Zen 4, Cooper Lake)
// amx          AMX bf16 and int8 tiles (Sapphire Rapids)
enum class Isa { portable, avx2, avx512, avx512_bf16, amx };

// The best level that this machine and its kernel offer; RADIX_CPU_ISA=<level> lowers it (for tests).
// Throws Error when that names an unknown level or one this machine does not have.
Isa active_isa();
const char* isa_name(Isa isa);

}  // namespace radix::cpu

// RK_CPU_TABLE(NormKernels, norm): declares norm_table in the namespace of each level (each kernel source defines its
// own) and norm_kernels(), the table to call.
#define RK_CPU_TABLE(Type, family)                               \
  namespace portable {                                           \
  extern const Type family##_table;                              \
  }                                                              \
  namespace avx2 {                                               \
  extern const Type family##_table;                              \
  }                                                              \
  namespace avx512 {                                             \
  extern const Type family##_table;                              \
  }                                                              \
  namespace avx512_bf16 {                                        \
  extern const Type family##_table;                              \
  }                                                              \
  namespace amx {                                                \
  extern const Type family##_table;                              \
  }                                                              \
  inline const Type& family##_kernels() {                        \
    switch (active_isa()) {                                      \
      case Isa::amx: return amx::family##_table;                 \
      case Isa::avx512_bf16: return avx512_bf16::family##_table; \
      case Isa::avx512: return avx512::family##_table;           \
      case Isa::avx2: return avx2::family##_table;               \
      default: return portable::family##_table;                  \
    }                                                            \
  }
