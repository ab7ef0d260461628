// In place of csrc/gpu/device/reduce.h: a block without warps.
#pragma once

#include "harness.h"

namespace radix::gpu {

template <int kThreads, class T, class Op>
inline T block_reduce(T value, Op op) {
  static_assert(kThreads == emulated::kBlockThreads && sizeof(T) == 8);
  auto& block = *emulated::current_block;
  block.shared[threadIdx.x] = value;
  block_barrier();
  T total = block.shared[0];
  for (int t = 1; t < kThreads; t++) total = op(total, block.shared[t]);
  block_barrier();
  return total;
}

}  // namespace radix::gpu
