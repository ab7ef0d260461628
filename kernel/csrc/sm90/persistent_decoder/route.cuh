// A mixture's choice: the experts of each token with the largest logits, and their softmax. Every block that multiplies
// with them chooses for itself, from the same words, so that nothing but the logits is exchanged.
#pragma once

#include "sm90/persistent_decoder/product.cuh"

namespace radix::persistent_decoder {

// In the order of the logits; NaN is the least, and both zeros are one.
__device__ inline uint32_t key_of(float logit) {
  if (isnan(logit)) return 0;
  const uint32_t bits = __float_as_uint(logit + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline float logit_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// The logits of all tokens, as keys.
__device__ inline void take_logits(const Params& p, uint32_t flag, RoutingMemory& shared) {
#pragma unroll 1
  for (int i = threadIdx.x * 2; i < p.tokens * p.experts; i += kComputeThreads * 2) {
    const uint64_t* from = p.workspace.logits + i;
    Words<2> words;
    words.load(from);
    words.settle(from, flag);
    shared.keys[i] = key_of(__uint_as_float(words.data(0)));
    shared.keys[i + 1] = key_of(__uint_as_float(words.data(1)));
  }
}

// An expert's rank is the number of those before it: larger, or as large with a lower number.
__device__ inline void choose(const Params& p, RoutingMemory& shared) {
#pragma unroll 1
  for (int i = threadIdx.x; i < p.tokens * p.experts; i += kComputeThreads) {
    const int token = i / p.experts, expert = i - token * p.experts;
    const uint32_t* keys = shared.keys + token * p.experts;
    const uint32_t own = keys[expert];
    int rank = 0;
#pragma unroll 1
    for (int first = 0; first < p.experts; first += 8) {
      uint4 others[2];
#pragma unroll
      for (int h = 0; h < 2; h++) others[h] = *reinterpret_cast<const uint4*>(keys + first + h * 4);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const uint4& four = others[j / 4];
        const uint32_t other = j % 4 == 0 ? four.x : j % 4 == 1 ? four.y : j % 4 == 2 ? four.z : four.w;
        const bool is_before = first + j < expert ? other >= own : other > own;
        rank += is_before ? 1 : 0;
      }
    }
    if (rank < p.top_k) shared.experts[token][rank] = expert;
  }
}

// The weights of token `warp`'s experts, a lane each.
__device__ inline void weigh(const Params& p, int token, RoutingMemory& shared) {
  const int lane = threadIdx.x % 32;
  const uint32_t* keys = shared.keys + token * p.experts;
  const float most = logit_of(keys[shared.experts[token][0]]);
  const float own = __expf(logit_of(keys[shared.experts[token][lane % p.top_k]]) - most);
  float sum = lane < p.top_k ? own : 0.f;
  if (!p.renormalize) {
    sum = 0;
#pragma unroll 1
    for (int i = lane; i < p.experts; i += 32) sum += __expf(logit_of(keys[i]) - most);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  if (lane < p.top_k) shared.weights[token][lane] = __fdividef(own, sum);
}

// Between the router's product and the experts'. The warps that stream go on as soon as they have the
// experts' numbers.
__device__ inline void route(const Params& p, uint32_t flag, RoutingMemory& shared) {
  const int warp = threadIdx.x / 32;
  take_logits(p, flag, shared);
  compute_sync();
  choose(p, shared);
  __syncwarp();
  sm90::barrier_arrive_warp(&shared.found);
  compute_sync();
  if (warp < p.tokens) weigh(p, warp, shared);
}

}  // namespace radix::persistent_decoder
