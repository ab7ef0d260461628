// Warpgroup matrix products (wgmma): d[64, N] (+)= a[64, K] * b[N, K]^T with K of 32 bytes, a and b in shared memory.
//
// Four consecutive warps issue one together. Their accumulators: warp w holds rows 16 w to 16 w + 15; lane 4 g + t
// holds, for each 8 columns c, d[4 c + 0, 1] = row g, columns 8 c + 2 t, + 1 and d[4 c + 2, 3] = the same of row g + 8.
// Operands lie K-major in the 128-byte swizzle that TMA writes: rows of 128 bytes, atoms of 8 rows, 1024-byte aligned.
#pragma once

#include <type_traits>

#include "gpu/device/fp8.h"
#include "sm90/common/mbarrier.cuh"

namespace radix::sm90 {

// Describes an operand that begins at `p` (a row of 128 bytes a step of 1; K advances by 32 bytes within the row).
__device__ inline uint64_t swizzled_operand(const void* p) {
  constexpr uint64_t kAtomStep = 1024 >> 4, kSwizzle128 = 1;
  return (shared_address(p) & 0x3ffff) >> 4 | uint64_t{1} << 16 | kAtomStep << 32 | kSwizzle128 << 62;
}
// The same in two words, of which only the lower one holds the address: offsets are added to it in units of 16 bytes.
__device__ inline uint32_t operand_low_at(uint32_t address) {
  return (address & 0x3ffff) >> 4 | 1u << 16;
}
__device__ inline uint32_t operand_low(const void* p) {
  return operand_low_at(shared_address(p));
}
__device__ inline uint64_t operand_at(uint32_t low) {
  constexpr uint64_t kHigh = uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32;
  return kHigh | low;
}
// The operand 32 bytes further along K.
__device__ inline uint64_t next_k(uint64_t operand, int steps = 1) {
  return operand + steps * (32 >> 4);
}

// Before the first product of a group, and after the accumulators were touched by other instructions.
__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kLeft committed groups are unfinished.
template <int kLeft>
__device__ inline void wgmma_wait() {
  static_assert(kLeft >= 0 && kLeft < 8);
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Accumulators that a pending product writes may not move past this.
template <int n>
__device__ inline void wgmma_hold(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int n>
__device__ inline void wgmma_hold(int32_t (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; i++) asm volatile("" : "+r"(d[i])::"memory");
}

// Element types of a and b, as the instruction spells them.
enum class Operand { bf16, f16, e4m3, s8 };
template <class T>
inline constexpr Operand kOperand = __is_same(T, e4m3)     ? Operand::e4m3
                                    : __is_same(T, int8_t) ? Operand::s8
                                    : __is_same(T, bf16)   ? Operand::bf16
                                                           : Operand::f16;
__host__ __device__ constexpr int operand_bytes(Operand type) {
  return type == Operand::e4m3 || type == Operand::s8 ? 1 : 2;
}
// What the tensor cores add up in: float32, or int32, whose sums are exact.
template <Operand kType>
using Accumulator = std::conditional_t<kType == Operand::s8, int32_t, float>;

// `c`: the constraint of one register.
#define RK_OUT4(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
// Placeholders and constraints of 4 ... 128 accumulators.
// clang-format off
#define RK_D4 "%0, %1, %2, %3"
#define RK_D8 RK_D4 ", %4, %5, %6, %7"
#define RK_D16 RK_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define RK_D32 RK_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define RK_D40 RK_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define RK_D48 RK_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define RK_D64 RK_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RK_D72 RK_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define RK_D80 RK_D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define RK_D88 RK_D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define RK_D96 RK_D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define RK_D112 RK_D96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define RK_D128 RK_D96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define RK_O4(c, d) RK_OUT4(c, d, 0)
#define RK_O8(c, d) RK_O4(c, d), RK_OUT4(c, d, 4)
#define RK_O16(c, d) RK_O8(c, d), RK_OUT4(c, d, 8), RK_OUT4(c, d, 12)
#define RK_O32(c, d) RK_O16(c, d), RK_OUT4(c, d, 16), RK_OUT4(c, d, 20), RK_OUT4(c, d, 24), RK_OUT4(c, d, 28)
#define RK_O40(c, d) RK_O32(c, d), RK_OUT4(c, d, 32), RK_OUT4(c, d, 36)
#define RK_O48(c, d) RK_O40(c, d), RK_OUT4(c, d, 40), RK_OUT4(c, d, 44)
#define RK_O64(c, d) RK_O32(c, d), RK_OUT4(c, d, 32), RK_OUT4(c, d, 36), RK_OUT4(c, d, 40), RK_OUT4(c, d, 44), RK_OUT4(c, d, 48), RK_OUT4(c, d, 52), \
  RK_OUT4(c, d, 56), RK_OUT4(c, d, 60)
#define RK_O72(c, d) RK_O64(c, d), RK_OUT4(c, d, 64), RK_OUT4(c, d, 68)
#define RK_O80(c, d) RK_O64(c, d), RK_OUT4(c, d, 64), RK_OUT4(c, d, 68), RK_OUT4(c, d, 72), RK_OUT4(c, d, 76)
#define RK_O88(c, d) RK_O80(c, d), RK_OUT4(c, d, 80), RK_OUT4(c, d, 84)
#define RK_O96(c, d) RK_O64(c, d), RK_OUT4(c, d, 64), RK_OUT4(c, d, 68), RK_OUT4(c, d, 72), RK_OUT4(c, d, 76), RK_OUT4(c, d, 80), RK_OUT4(c, d, 84), \
  RK_OUT4(c, d, 88), RK_OUT4(c, d, 92)
#define RK_O112(c, d) RK_O96(c, d), RK_OUT4(c, d, 96), RK_OUT4(c, d, 100), RK_OUT4(c, d, 104), RK_OUT4(c, d, 108)
#define RK_O128(c, d) RK_O96(c, d), RK_OUT4(c, d, 96), RK_OUT4(c, d, 100), RK_OUT4(c, d, 104), RK_OUT4(c, d, 108), RK_OUT4(c, d, 112), RK_OUT4(c, d, 116), \
  RK_OUT4(c, d, 120), RK_OUT4(c, d, 124)
// clang-format on
#define RK_WGMMA_RUN(shape_types, count, a_, b_, p_, c, scales)                                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_                                                              \
               ", 0;\n"                                                                                              \
               "wgmma.mma_async.sync.aligned." shape_types " {" RK_D##count "}, %" #a_ ", %" #b_ ", p" scales ";\n}" \
               : RK_O##count(c, d)                                                                                   \
               : "l"(a), "l"(b), "r"(accumulate))

// d = a * b^T, or d += with accumulate. kColumns: rows of b.
template <Operand kType, int kColumns>
struct Wgmma;
#define RK_WGMMA(columns, count, a_, b_, p_)                                                             \
  template <Operand kType>                                                                               \
  struct Wgmma<kType, columns> {                                                                         \
    static __device__ void run(Accumulator<kType> (&d)[count], uint64_t a, uint64_t b, int accumulate) { \
      if constexpr (kType == Operand::bf16) {                                                            \
        RK_WGMMA_RUN("m64n" #columns "k16.f32.bf16.bf16", count, a_, b_, p_, "+f", ", 1, 1, 0, 0");      \
      } else if constexpr (kType == Operand::f16) {                                                      \
        RK_WGMMA_RUN("m64n" #columns "k16.f32.f16.f16", count, a_, b_, p_, "+f", ", 1, 1, 0, 0");        \
      } else if constexpr (kType == Operand::e4m3) {                                                     \
        RK_WGMMA_RUN("m64n" #columns "k32.f32.e4m3.e4m3", count, a_, b_, p_, "+f", ", 1, 1");            \
      } else {                                                                                           \
        RK_WGMMA_RUN("m64n" #columns "k32.s32.s8.s8", count, a_, b_, p_, "+r", "");                      \
      }                                                                                                  \
    }                                                                                                    \
  };
RK_WGMMA(8, 4, 4, 5, 6)
RK_WGMMA(16, 8, 8, 9, 10)
RK_WGMMA(32, 16, 16, 17, 18)
RK_WGMMA(64, 32, 32, 33, 34)
RK_WGMMA(80, 40, 40, 41, 42)
RK_WGMMA(96, 48, 48, 49, 50)
RK_WGMMA(128, 64, 64, 65, 66)
RK_WGMMA(144, 72, 72, 73, 74)
RK_WGMMA(160, 80, 80, 81, 82)
RK_WGMMA(176, 88, 88, 89, 90)
RK_WGMMA(192, 96, 96, 97, 98)
RK_WGMMA(224, 112, 112, 113, 114)
RK_WGMMA(256, 128, 128, 129, 130)
#undef RK_WGMMA
#undef RK_WGMMA_RUN

}  // namespace radix::sm90
