// 8 x 8 matrices of 16-bit elements between registers and shared memory.
#pragma once

#include "sm90/common/mbarrier.cuh"

namespace radix::sm90 {

// Four matrices whose rows begin at the addresses that lanes 8 i .. 8 i + 7 give; a lane 4 g + t gets row g, columns 2
// t,
// + 1 of each.
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// The way back, places as above.
__device__ inline void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// Transposed. A lane 4 g + t holds row g, columns 2 t, + 1 of each matrix; lane 8 i + r gives the 16 bytes for column r
// of matrix i (of two matrices: lanes 0 to 15).
__device__ inline void store_transposed(uint32_t to, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
__device__ inline void store_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

}  // namespace radix::sm90
