// The order of ids that the filters work in (value descending, id ascending), and the search for a border in it without
// sorting: four rounds of a 256-bin histogram over the digits of an order-preserving key.
#pragma once

#include "gpu/reduce.h"

namespace radix::gpu {

constexpr int kSelectThreads = 1024;
constexpr int kBins = 256;

// Larger floats have larger keys; -0 and 0 are one number and get one key.
__device__ inline uint32_t order_key(float x) {
  const uint32_t u = __float_as_uint(x == 0.f ? 0.f : x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The ids before the border: key above `key`, or equal to it and id at most `last_id`.
struct Border {
  uint32_t key = 0;
  int32_t last_id = INT32_MAX;
  __device__ bool keeps(uint32_t k, int64_t id) const { return k > key || (k == key && id <= last_id); }
};

// Finds the border behind which lies everything that comes after `limit` of weight: an id is kept while the weight of
// the ids before it is below limit (so the first is always kept). weight(id, key) is a 64-bit integer, 0 for ids that
// do not take part; integers, so that the order of the atomic additions does not matter. All threads of the block call
// it.
template <class Key, class Weight>
__device__ Border find_border(int64_t n, uint64_t limit, const Key& key_of, const Weight& weight) {
  __shared__ unsigned long long bins[kBins];
  __shared__ unsigned long long before_shared;
  __shared__ uint32_t prefix_shared;
  uint32_t prefix = 0;
  uint64_t before = 0;  // weight of keys above the current prefix
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kBins; i += kSelectThreads) bins[i] = 0;
    __syncthreads();
    const uint32_t done = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
    for (int64_t id = threadIdx.x; id < n; id += kSelectThreads) {
      const uint32_t key = key_of(id);
      if ((key & done) != prefix) continue;
      const uint64_t w = weight(id, key);
      if (w) atomicAdd(&bins[key >> shift & 0xff], static_cast<unsigned long long>(w));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      uint64_t sum = before;
      int digit = kBins - 1, last = -1;
      // The bin in which the weight before reaches the limit; the last one in use when it never does.
      for (; digit >= 0; digit--) {
        if (bins[digit] == 0) continue;
        last = digit;
        if (sum + bins[digit] >= limit) break;
        sum += bins[digit];
      }
      if (digit < 0 && last >= 0) sum -= bins[last];
      before_shared = sum;
      prefix_shared = prefix | static_cast<uint32_t>(last < 0 ? 0 : last) << shift;
    }
    __syncthreads();
    prefix = prefix_shared;
    before = before_shared;
    __syncthreads();
  }
  // Among equal keys the lowest ids stay: walk them in order until the limit is reached.
  __shared__ int32_t last_shared;
  if (threadIdx.x == 0) last_shared = INT32_MAX;
  __syncthreads();
  for (int64_t first = 0; first < n && last_shared == INT32_MAX; first += kSelectThreads) {
    const int64_t id = first + threadIdx.x;
    const uint64_t w = id < n && key_of(id) == prefix ? weight(id, prefix) : 0;
    // Exclusive prefix sum over the block, by warps.
    __shared__ uint64_t warp_sum[kSelectThreads / RK_WARP];
    uint64_t inclusive = w;
    const int lane = threadIdx.x % RK_WARP, warp = threadIdx.x / RK_WARP;
    for (int step = 1; step < RK_WARP; step <<= 1) {
      const uint64_t other = shuffle_up(inclusive, step);
      if (lane >= step) inclusive += other;
    }
    if (lane == RK_WARP - 1) warp_sum[warp] = inclusive;
    __syncthreads();
    uint64_t offset = before;
    for (int i = 0; i < warp; i++) offset += warp_sum[i];
    const uint64_t mine = offset + inclusive - w;
    // The last one that is still below the limit and reaches it.
    if (w && mine < limit && mine + w >= limit) last_shared = static_cast<int32_t>(id);
    for (int i = 0; i < kSelectThreads / RK_WARP; i++) before += warp_sum[i];
    __syncthreads();
  }
  const Border border{prefix, last_shared};
  __syncthreads();
  return border;
}

}  // namespace radix::gpu
