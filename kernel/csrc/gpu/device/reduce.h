// Reductions over a block in one fixed order, so that the same input gives the same bits.
#pragma once

#include "gpu/device/compat.h"

namespace radix::gpu {

// Over the lanes whose numbers differ in the bits of kMask, a power of two, and below; each of them gets the result.
// No loop: clang 21 unrolls none that a large kernel copies, and chooses the way to the other lane anew in each round.
template <int kMask, class T, class Op>
__device__ inline T reduce_lanes(T value, Op op) {
  value = op(value, shuffle_xor(value, kMask));
  if constexpr (kMask > 1) value = reduce_lanes<kMask / 2>(value, op);
  return value;
}

// Every lane of the warp calls it and gets the result.
template <class T, class Op>
__device__ inline T warp_reduce(T value, Op op) {
#if defined(__HIP__)
  value = op(value, permute_row<kQuadXor1>(value));
  value = op(value, permute_row<kQuadXor2>(value));
  value = op(value, permute_row<kHalfRowMirror>(value));  // the lanes of a quad hold the same by now
  value = op(value, permute_row<kRowMirror>(value));
  return op(op(read_lane(value, 0), read_lane(value, 16)), op(read_lane(value, 32), read_lane(value, 48)));
#endif
#pragma unroll
  for (int mask = RK_WARP / 2; mask > 0; mask >>= 1) value = op(value, shuffle_xor(value, mask));
  return value;
}

// Every thread gets the result. kThreads is a multiple of RK_WARP; all threads of the block call it.
template <int kThreads, class T, class Op>
__device__ inline T block_reduce(T value, Op op) {
  constexpr int kWarps = kThreads / RK_WARP;
  static_assert(kThreads % RK_WARP == 0 && kWarps >= 1 && kWarps <= 64);
  __shared__ T part[kWarps];
  value = warp_reduce(value, op);
  if (threadIdx.x % RK_WARP == 0) part[threadIdx.x / RK_WARP] = value;
  __syncthreads();
  value = part[0];
#pragma unroll
  for (int w = 1; w < kWarps; w++) value = op(value, part[w]);
  __syncthreads();  // part is free again for the next reduction
  return value;
}

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
// The larger number; a NaN loses.
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

struct MaxWord {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};

}  // namespace radix::gpu
