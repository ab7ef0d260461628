// A warp's matrix product (mma.sync): 16 x 8 sums from 16-bit operands, 16 of k.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace radix::sm90 {

// d += a * b for a 16 x 16 tile a of T and a 16 x 8 tile b.
template <class T>
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(__is_same(T, bf16) || __is_same(T, f16), "mma.m16n8k16 of 16-bit floats");
  if constexpr (__is_same(T, bf16)) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The same with a as one value.
template <class T>
__device__ inline void mma(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  const uint32_t words[4] = {a.x, a.y, a.z, a.w};
  mma<T>(d, words, b0, b1);
}

}  // namespace radix::sm90
