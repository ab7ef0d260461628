// How blocks hand each other activations: words of 64 bits that hold 32 bits of data and a flag, written and read whole
// (PTX: 64-bit accesses are single-copy atomic). A reader waits for the words themselves, so that there is no barrier
// and no fence between a result and its use: a third of the time of both.
//
// A flag names a step of the launch; a word is as old as its flag. What a word held before is overwritten only by
// blocks that have received something from all its readers, through the chain of full products in between. Flags of 32
// bits come back after 2^32 steps: words that a launch does not use are cleared whenever a quarter of them has passed.
#pragma once

#include <cstdint>

#include "sm90/common/mbarrier.cuh"

namespace radix::persistent_decoder {

constexpr int kWarps = 8;  // of a block, that compute
constexpr int kComputeThreads = kWarps * 32;

// Among the computing threads of a block.
__device__ inline void compute_sync() {
  sm90::named_barrier(1, kComputeThreads);
}

__device__ inline void put_word(uint64_t* to, uint32_t data, uint32_t flag) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(uint64_t{flag} << 32 | data) : "memory");
}
__device__ inline void put_float(uint64_t* to, float data, uint32_t flag) {
  put_word(to, __float_as_uint(data), flag);
}

// kWords neighbouring words, on their way or there.
template <int kWords>
struct Words {
  static_assert(kWords % 2 == 0, "two words an access");
  uint64_t at[kWords];

  __device__ void load(const uint64_t* from) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2)
      asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                   : "=l"(at[i]), "=l"(at[i + 1])
                   : "l"(from + i)
                   : "memory");
  }
  __device__ bool are(uint32_t flag) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kWords; i++) all = all && static_cast<uint32_t>(at[i] >> 32) == flag;
    return all;
  }
  // Until all have the flag.
  __device__ void settle(const uint64_t* from, uint32_t flag) {
    while (!are(flag)) load(from);
  }
  __device__ uint32_t data(int i) const { return static_cast<uint32_t>(at[i]); }
};

// Eight bf16.
__device__ inline uint4 packed(const Words<4>& words) {
  return {words.data(0), words.data(1), words.data(2), words.data(3)};
}

}  // namespace radix::persistent_decoder
