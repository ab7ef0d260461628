// What the collectives share: a tensor as Words, sending a stretch of it, and the sum over the ranks in rank order.
#pragma once

#include <cstring>

#include "gpu/comm/peer.h"
#include "gpu/device/element.h"

namespace radix::gpu {

// Words that a thread has under way at a time.
template <int N>
constexpr int kUnderWay = N == 2   ? 4
                          : N == 4 ? 2
                                   : 1;

template <class To, class From>
__device__ inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// n bytes as Words, the last of which may be partly filled. What is not `aligned` to 16 goes byte by byte.
struct Bytes {
  char* data;
  int64_t n;
  bool aligned;

  __device__ int64_t words() const { return (n + 15) / 16; }
  __device__ Words load(int64_t i) const {
    if (aligned && 16 * i + 16 <= n) return *reinterpret_cast<const Words*>(data + 16 * i);
    return words_of(load_half(16 * i), load_half(16 * i + 8));
  }
  __device__ void store(int64_t i, const Words& w) const {
    if (aligned && 16 * i + 16 <= n) {
      *reinterpret_cast<Words*>(data + 16 * i) = w;
    } else {
      store_half(16 * i, low_half(w));
      store_half(16 * i + 8, high_half(w));
    }
  }
  // The eight bytes that begin at `at`, as far as they are there.
  __device__ uint64_t load_half(int64_t at) const {
    if (aligned && at + 8 <= n) return *reinterpret_cast<const uint64_t*>(data + at);
    uint64_t bits = 0;
#pragma unroll 1
    for (int j = 0; j < 8 && at + j < n; j++) bits |= uint64_t{static_cast<uint8_t>(data[at + j])} << 8 * j;
    return bits;
  }
  __device__ void store_half(int64_t at, uint64_t bits) const {
    if (aligned && at + 8 <= n) {
      *reinterpret_cast<uint64_t*>(data + at) = bits;
      return;
    }
#pragma unroll 1
    for (int j = 0; j < 8 && at + j < n; j++) data[at + j] = static_cast<char>(bits >> 8 * j);
  }
};

// The places of a tensor that this block moves.
struct Stretch {
  Bytes in;
  int64_t first;
  int count;

  __device__ Stretch(const Bytes& tensor, int per_block) : in(tensor), first(int64_t{blockIdx.x} * per_block) {
    const int64_t left = tensor.words() - first;
    count = static_cast<int>(left < per_block ? left : per_block);
  }
  __device__ Words load(int place) const { return sealed(in.load(first + place)); }
};

// In float32, rank 0 first, rounded once.
template <class T, int N>
__device__ inline Words sum_of(const Words (&w)[N]) {
  constexpr int kSize = 16 / sizeof(T);
  float sum[kSize];
#pragma unroll
  for (int r = 0; r < N; r++) {
    const auto pack = bits_as<Pack<T, kSize>>(w[r]);
#pragma unroll
    for (int j = 0; j < kSize; j++) sum[j] = r == 0 ? to_float(pack.at[j]) : sum[j] + to_float(pack.at[j]);
  }
  Pack<T, kSize> out;
#pragma unroll
  for (int j = 0; j < kSize; j++) from_float(sum[j], out.at[j]);
  return sealed(bits_as<Words>(out));
}

// A first look at what the ranks send to `at`, `at + step`, ...; ours is `own`.
template <int N>
__device__ inline void look_all(const Channel<N>& channel, int rank, int at, int step, const Words& own,
                                Words (&w)[N]) {
#pragma unroll
  for (int r = 0; r < N; r++) w[r] = r == rank ? own : channel.look(at + r * step);
}
template <int N>
__device__ inline void settle_all(const Channel<N>& channel, int rank, int at, int step, Words (&w)[N], Wait& wait) {
#pragma unroll
  for (int r = 0; r < N; r++)
    if (r != rank) channel.settle(at + r * step, r, w[r], wait);
}

// The words at base, base + step, ... of the stretch to `at` and on of every other rank.
template <int N>
__device__ inline void send_batch(const Channel<N>& channel, const Stretch& stretch, int base, int step, int at) {
  Words w[kUnderWay<N>];
#pragma unroll
  for (int b = 0; b < kUnderWay<N>; b++)
    if (base + b * step < stretch.count) w[b] = stretch.load(base + b * step);
#pragma unroll
  for (int b = 0; b < kUnderWay<N>; b++)
    if (base + b * step < stretch.count) channel.send_others(at + base + b * step, w[b]);
}

// Share r of the stretch, `share` places, to rank r, where it stands at our number times share.
template <int N>
__device__ inline void send_shares(const Channel<N>& channel, const Stretch& stretch, int rank, int share) {
  for (int i = threadIdx.x; i < share; i += blockDim.x) {
    Words w[N];
#pragma unroll
    for (int k = 1; k < N; k++) {
      const int place = (rank + k) % N * share + i;
      if (place < stretch.count) w[k] = stretch.load(place);
    }
#pragma unroll
    for (int k = 1; k < N; k++)
      if ((rank + k) % N * share + i < stretch.count) channel.send(k, rank * share + i, w[k]);
  }
}

// Sums our share of what send_shares sent; done(place in the stretch, sum).
template <class T, int N, class Done>
__device__ inline void sum_share(const Channel<N>& channel, const Stretch& stretch, int rank, int share, Wait& wait,
                                 const Done& done) {
  for (int i = threadIdx.x; i < share; i += blockDim.x) {
    const int place = rank * share + i;
    if (place >= stretch.count) break;
    Words w[N];
    look_all<N>(channel, rank, i, share, stretch.load(place), w);
    settle_all<N>(channel, rank, i, share, w, wait);
    done(place, sum_of<T, N>(w));
  }
}

}  // namespace radix::gpu
