// Writing into the memory of other GPUs and waiting for what they write into ours.
//
// Data are their own flags. A word of staging memory that holds kEmpty has not arrived; everything else is data. So one
// store over the link carries a word and the news of it, no order between words matters, and no barrier is needed. The
// reader puts kEmpty back. Every block is a channel of its own with two sides, used in turn by its calls:
//
//   call n      every rank fills side n % 2 of the others' channel and empties its own as it reads
//   call n + 2  writes that side again. A rank starts it after its call n + 1, in which it has got data from every
//               other rank's call n + 1, which began when that rank's call n had ended, its side emptied.
//
// The number of a channel's calls lives on the device, so a captured graph can be replayed. A channel may idle while
// smaller calls use fewer blocks: the argument is the same for each channel alone. A block waits for the blocks of its
// own number only, so ranks whose blocks start at different times cannot block each other.
#pragma once

#include "gpu/comm/peer_group.h"
#include "gpu/device/compat.h"

namespace radix::gpu {

#if defined(__HIP__)
#define RK_GLOBAL __attribute__((address_space(1)))  // the compiler does not see through pointers in arrays
#else
#define RK_GLOBAL
#endif

__device__ inline Words words_of(uint64_t low, uint64_t high) {
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
           static_cast<uint32_t>(high >> 32)}};
}
__device__ inline uint64_t low_half(const Words& w) {
  return uint64_t{w.at[1]} << 32 | w.at[0];
}
__device__ inline uint64_t high_half(const Words& w) {
  return uint64_t{w.at[3]} << 32 | w.at[2];
}

// Relaxed accesses that every GPU and the host see. The halves of Words arrive whole.
template <class T>
__device__ inline T load_shared(const T* p) {
#if defined(__NVCC__)
  return *static_cast<const volatile T*>(p);
#else
  return __atomic_load_n((const RK_GLOBAL T*)p, __ATOMIC_RELAXED);
#endif
}
template <class T>
__device__ inline void store_shared(T* p, T value) {
#if defined(__NVCC__)
  *static_cast<volatile T*>(p) = value;
#else
  __atomic_store_n((RK_GLOBAL T*)p, value, __ATOMIC_RELAXED);
#endif
}
__device__ inline Words load_shared(const Words* p) {
#if defined(__NVCC__)
  uint64_t low, high;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(p) : "memory");
  return words_of(low, high);
#else
  const auto* half = reinterpret_cast<const uint64_t*>(p);
  return words_of(load_shared(half), load_shared(half + 1));
#endif
}
__device__ inline void store_shared(Words* p, const Words& w) {
#if defined(__NVCC__)
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(low_half(w)), "l"(high_half(w)) : "memory");
#else
  auto* half = reinterpret_cast<uint64_t*>(p);
  store_shared(half, low_half(w));
  store_shared(half + 1, high_half(w));
#endif
}

__device__ inline Words empty_words() {
  return {{kEmpty, kEmpty, kEmpty, kEmpty}};
}

// Values that may be sent: no word of them looks empty.
__device__ inline Words sealed(Words w) {
#pragma unroll
  for (int i = 0; i < 4; i++) w.at[i] = w.at[i] == kEmpty ? kNan : w.at[i];
  return w;
}
__device__ inline bool arrived(const Words& w) {
  return w.at[0] != kEmpty && w.at[1] != kEmpty && w.at[2] != kEmpty && w.at[3] != kEmpty;
}

__device__ inline uint64_t clock_ns() {
#if defined(__NVCC__)
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
#else
  return __builtin_amdgcn_s_memrealtime() * 10;  // 100 MHz on every CDNA GPU
#endif
}

// A thread's patience in one call.
class Wait {
 public:
  __device__ explicit Wait(const PeerView& view) : view_(view) {}

  // After a look at what `rank` should have sent: whether to look again. Once it has said no it goes on doing so.
  __device__ bool again(int rank) {
    if (over_) return false;
    if (++looks_ % kLooks == 0) over_ = !may_go_on(rank);
    return !over_;
  }

 private:
  static constexpr unsigned kLooks = 512;  // a fraction of a millisecond

  __device__ bool may_go_on(int rank) {
    const uint64_t now = clock_ns();
    if (start_ == 0) start_ = now;
    const uint64_t aborted = load_shared(view_.control);
    if (aborted == 0 && now - start_ < view_.timeout_ns) return true;
    // The first reason stays.
    uint64_t* error = view_.control + kLineWords * (1 + view_.rank) + 1;
    if (load_shared(error) == 0) store_shared<uint64_t>(error, aborted ? aborted : kLate + rank);
    __threadfence_system();
    if (aborted == 0) store_shared<uint64_t>(view_.control, 1 + view_.rank);
    return false;
  }

  const PeerView& view_;
  uint64_t start_ = 0;
  unsigned looks_ = 0;
  bool over_ = false;
};

// This block's channel in one call, between N ranks. Offsets are places in the channel's side, the same on every rank.
template <int N>
class Channel {
 public:
  __device__ explicit Channel(const PeerView& view) : calls_(view.calls + blockIdx.x) {
    call_ = load_shared(calls_);
    const int64_t base = (blockIdx.x + (call_ % 2) * int64_t{kMaxChannels}) * view.side;
#pragma unroll
    for (int k = 0; k < N; k++) pool_[k] = view.pool[k] + base;
  }

  // To the k-th rank after us; 0 is ourselves.
  __device__ void send(int k, int64_t at, const Words& w) const { store_shared(pool_[k] + at, w); }
  __device__ void send_others(int64_t at, const Words& w) const {
#pragma unroll
    for (int k = 1; k < N; k++) send(k, at, w);
  }
  __device__ Words look(int64_t at) const { return load_shared(pool_[0] + at); }
  // Waits until `w`, what the last look found of `rank`'s data, has arrived; makes the place empty.
  __device__ void settle(int64_t at, int rank, Words& w, Wait& wait) const {
    while (!arrived(w) && wait.again(rank)) w = look(at);
    empty(at);
  }
  __device__ void empty(int64_t at) const { store_shared(pool_[0] + at, empty_words()); }

  // All threads of the block call it, last.
  __device__ void close() const {
    __syncthreads();
    if (threadIdx.x == 0) store_shared(calls_, call_ + 1);
  }

 private:
  uint32_t* calls_;
  uint32_t call_;
  Words* pool_[N];
};

}  // namespace radix::gpu
