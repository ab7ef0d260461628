// Which experts a small batch names: found by every block for itself, so that routing costs no launch.
#pragma once

#include <cstdint>

#include "sm90/experts/problem.cuh"

namespace radix::experts {

constexpr int kMmaM16Warps = 8, kMmaM16Threads = kMmaM16Warps * 32;
static_assert(kMmaM16Pairs <= kMmaM16Threads, "a thread finds the expert of each pair");
static_assert(kMmaM16Tokens * 8 <= kMmaM16Threads, "a thread ends each of an item's 8 columns of a token");

// The named experts that are here, in ascending order of their local number, and each one's pairs by token. A token
// that names an expert twice has one pair there, with the sum of the weights.
struct ChosenExperts {
  int count;
  uint32_t bits[kMaxExperts / 32];  // by local number
  int first[kMaxExperts / 32];      // slots before each word
  int16_t local[kMmaM16Pairs];      // of a pair; -1: adds nothing here
  float given[kMmaM16Pairs];
  int16_t expert[kMmaM16Pairs];               // of a slot
  int16_t pair[kMmaM16Pairs][kMmaM16Tokens];  // -1: the token does not name it
  float weight[kMmaM16Pairs][kMmaM16Tokens];

  // Before the pairs are known. The next barrier is in find().
  __device__ void clear() {
    if (threadIdx.x < kMaxExperts / 32) bits[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < kMmaM16Pairs * kMmaM16Tokens; i += kMmaM16Threads) pair[0][i] = -1;
    __syncthreads();
  }

  __device__ void find(const Routing& r) {
    const int i = threadIdx.x, pairs = r.tokens * r.topk;
    int mine = -1;
    if (i < pairs) {
      given[i] = r.weights[i];
      mine = r.local(r.ids[i]);
      local[i] = static_cast<int16_t>(mine);
      if (mine >= 0) atomicOr(&bits[mine / 32], 1u << mine % 32);
    }
    __syncthreads();
    if (i < 32) {
      uint32_t word = bits[i];
      const int own = __popc(word);
      int sum = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, sum, step);
        if (i >= step) sum += before;
      }
      if (i == 31) count = sum;
      int slot = first[i] = sum - own;
      for (; word; word &= word - 1) expert[slot++] = static_cast<int16_t>(i * 32 + __ffs(word) - 1);
    }
    __syncthreads();
    if (mine >= 0) {
      const int token = i / r.topk, begin = token * r.topk;
      bool earlier = false;
      for (int j = begin; j < i; j++) earlier |= local[j] == mine;
      if (!earlier) {
        float sum = given[i];
        for (int j = i + 1; j < begin + r.topk; j++)
          if (local[j] == mine) sum += given[j];
        const int slot = first[mine / 32] + __popc(bits[mine / 32] & ((1u << mine % 32) - 1));
        pair[slot][token] = static_cast<int16_t>(i);
        weight[slot][token] = sum;
      }
    }
    __syncthreads();
  }
};

}  // namespace radix::experts
