// Which of several blocks is the last to be done: it goes on with what all of them have left, and nobody waits.
//
// Each block has a word in a workspace that nobody has cleared. It writes kArrived there and then looks at all of
// them; who finds everyone there takes the first word back, which one alone can, and clears the others. So no word
// holds kArrived when a launch ends, and none when it begins but by chance: both halves are NaNs that no arithmetic
// makes, and a workspace of other bytes equals the 64 bits once in 2^64.
#pragma once

#include <cstdint>

namespace radix::sm90 {

constexpr unsigned long long kArrived = 0xffb5'c3d1'7fa6'9e4b;

__device__ inline unsigned long long load_relaxed(const unsigned long long* word) {
  unsigned long long value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline void store_relaxed(unsigned long long* word, unsigned long long value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// By a warp, behind a barrier of all threads of the block that wrote what others are to read. words: of the first of
// `count` blocks, 32 at most, each `step` words behind the one before; mine: which is this block's. Of the blocks that
// call this, each once, it is true for one: its warp sees what all of them wrote before.
__device__ inline bool last_to_arrive(unsigned long long* words, int count, int step, int mine) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
    __threadfence();
    store_relaxed(words + mine * step, kArrived);
    __threadfence();  // of two blocks that look at the same time one at least sees the other
  }
  __syncwarp();
  const bool here = lane >= count || load_relaxed(words + lane * step) == kArrived;
  if (!__all_sync(~0u, here)) return false;
  bool taken = false;
  if (lane == 0) taken = atomicCAS(words, kArrived, 0ull) == kArrived;
  if (!__shfl_sync(~0u, taken, 0)) return false;
  if (lane > 0 && lane < count) store_relaxed(words + lane * step, 0);
  __threadfence();
  return true;
}

}  // namespace radix::sm90
