// The order of ids that the filters work in (value descending, id ascending), and the search for a border in it without
// sorting: eleven rounds over the digits of an order-preserving key. A digit has 3 bits, so that a thread keeps the
// sums for each of its values in registers: shared-memory histograms stand still where the values of a row share a
// digit.
#pragma once

#include "gpu/reduce.h"

namespace radix::gpu {

constexpr int kSelectThreads = 1024;
constexpr int kDigitBits = 3, kDigits = 1 << kDigitBits;

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

// Calls fn(id, x[id]) for the ids of this thread, with four loads under way at a time.
template <class Fn>
__device__ inline void for_each_id(const float* x, int64_t n, const Fn& fn) {
  constexpr int kBatch = 4;
  for (int64_t first = threadIdx.x; first < n; first += kBatch * kSelectThreads) {
    float values[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
      const int64_t id = first + j * kSelectThreads;
      values[j] = id < n ? x[id] : 0.f;
    }
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
      const int64_t id = first + j * kSelectThreads;
      if (id < n) fn(id, values[j]);
    }
  }
}

// Sums `mine` over the block, element by element, into `totals` in shared memory.
__device__ inline void reduce_digits(const uint64_t (&mine)[kDigits], uint64_t (&totals)[kDigits]) {
  constexpr int kWarps = kSelectThreads / RK_WARP;
  __shared__ uint64_t part[kWarps][kDigits];
#pragma unroll
  for (int d = 0; d < kDigits; d++) {
    const uint64_t sum = warp_reduce(mine[d], Sum());
    if (threadIdx.x % RK_WARP == 0) part[threadIdx.x / RK_WARP][d] = sum;
  }
  __syncthreads();
  if (threadIdx.x < kDigits) {
    uint64_t sum = 0;
    for (int w = 0; w < kWarps; w++) sum += part[w][threadIdx.x];
    totals[threadIdx.x] = sum;
  }
  __syncthreads();
}

// The last id with this key that is kept: walks them in order until the limit is reached.
template <class Weight>
__device__ int32_t last_id_of_ties(const float* x, int64_t n, float temperature, uint32_t key, uint64_t before,
                                   uint64_t limit, const Weight& weight) {
  __shared__ int32_t last;
  __shared__ uint64_t warp_sum[kSelectThreads / RK_WARP];
  if (threadIdx.x == 0) last = INT32_MAX;
  __syncthreads();
  for (int64_t first = 0; first < n && last == INT32_MAX; first += kSelectThreads) {
    const int64_t id = first + threadIdx.x;
    const float scaled = id < n ? x[id] / temperature : 0.f;
    const uint64_t w = id < n && order_key(scaled) == key ? weight(id, key, scaled) : 0;
    // Exclusive prefix sum over the block, by warps.
    uint64_t inclusive = w;
    const int lane = threadIdx.x % RK_WARP, warp = threadIdx.x / RK_WARP;
    for (int step = 1; step < RK_WARP; step <<= 1) {
      const uint64_t other = shuffle_up(inclusive, step);
      if (lane >= step) inclusive += other;
    }
    if (lane == RK_WARP - 1) warp_sum[warp] = inclusive;
    __syncthreads();
    uint64_t mine = before + inclusive - w;
    for (int i = 0; i < warp; i++) mine += warp_sum[i];
    // The last one that is still below the limit and reaches it.
    if (w && mine < limit && mine + w >= limit) last = static_cast<int32_t>(id);
    for (int i = 0; i < kSelectThreads / RK_WARP; i++) before += warp_sum[i];
    __syncthreads();
  }
  const int32_t found = last;
  __syncthreads();
  return found;
}

// Finds the border behind which lies everything that comes after `limit` of weight: an id is kept while the weight of
// the ids before it is below limit (so the first is always kept). The order is that of x / temperature. weight(id, key,
// scaled) is a 64-bit integer, 0 for ids that do not take part, the same for all others of one key; integers, so that
// the order of the additions does not matter. All threads of the block call it.
template <class Weight>
__device__ Border find_border(const float* x, int64_t n, float temperature, uint64_t limit, const Weight& weight) {
  __shared__ uint64_t totals[kDigits];  // weight of the keys under the prefix whose digit is at least d
  uint32_t prefix = 0;
  uint64_t before = 0;  // weight of keys above the current prefix
  for (int shift = 30; shift >= 0; shift -= kDigitBits) {
    const uint32_t done = shift == 30 ? 0 : 0xffffffffu << (shift + kDigitBits);
    uint64_t mine[kDigits] = {};
    for_each_id(x, n, [&](int64_t id, float value) {
      const float scaled = value / temperature;
      const uint32_t key = order_key(scaled);
      if ((key & done) != prefix) return;
      const uint64_t w = weight(id, key, scaled);
      const int digit = key >> shift & (kDigits - 1);
#pragma unroll
      for (int d = 0; d < kDigits; d++) mine[d] += digit >= d ? w : 0;
    });
    reduce_digits(mine, totals);
    // The digit at which the limit is reached; the last one in use when it never is.
    const bool reached = before + totals[0] >= limit;
    int digit = kDigits - 1;
    while (digit > 0 && (reached ? before + totals[digit] < limit : totals[digit] < totals[0])) digit--;
    prefix |= static_cast<uint32_t>(digit) << shift;
    if (digit < kDigits - 1) before += totals[digit + 1];
    __syncthreads();  // totals are free again
  }
  // Among equal keys the lowest ids stay. Mostly the border has one id, or room for all of its ids.
  uint64_t sum = 0, each = 0;
  for_each_id(x, n, [&](int64_t id, float value) {
    const float scaled = value / temperature;
    if (order_key(scaled) != prefix) return;
    const uint64_t w = weight(id, prefix, scaled);
    sum += w;
    each = w > each ? w : each;
  });
  sum = block_reduce<kSelectThreads>(sum, Sum());
  each = block_reduce<kSelectThreads>(each, MaxWord());
  if (before + sum < limit + each) return {prefix, INT32_MAX};
  return {prefix, last_id_of_ties(x, n, temperature, prefix, before, limit, weight)};
}

}  // namespace radix::gpu
