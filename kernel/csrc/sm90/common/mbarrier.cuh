// Barriers in shared memory that count arrivals and the bytes of asynchronous copies (PTX mbarrier).
//
// A pipeline of kStages has a "full" barrier a stage (the producer arrives and announces bytes) and an "empty" one (its
// consumers arrive). A barrier's phases alternate 0, 1, 0, ...: waiting for the parity of a phase returns once that
// phase has completed. A fresh barrier passes a wait for parity 1.
#pragma once

#include "sm90/common/shared_memory.cuh"

namespace radix::sm90 {

__device__ inline void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// After the inits, before anyone else (TMA, another block of the cluster) may use the barriers.
__device__ inline void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Names ending in _at take the barrier's address in shared memory, for loops that keep it in a register.
__device__ inline void barrier_arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive(uint64_t* barrier) {
  barrier_arrive_at(shared_address(barrier));
}

// A warp has read or written a stage: its lane 0 arrives for all. racecheck takes that for lane 0's own accesses, so
// that with RADIX_EVERY_LANE_ARRIVES, which tools/sanitize.sh wants, each lane arrives. Barriers of warps are made for
// kWarpArrivals of each.
#ifdef RADIX_EVERY_LANE_ARRIVES
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
__device__ inline void barrier_arrive_warp_at(uint32_t barrier) {
  if (kWarpArrivals > 1 || threadIdx.x % 32 == 0) barrier_arrive_at(barrier);
}
__device__ inline void barrier_arrive_warp(uint64_t* barrier) {
  barrier_arrive_warp_at(shared_address(barrier));
}

// Arrives, and keeps the phase open until so many bytes have been copied.
__device__ inline void barrier_arrive_expect_at(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  barrier_arrive_expect_at(shared_address(barrier), bytes);
}
__device__ inline bool barrier_try_wait_at(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}
__device__ inline void barrier_wait_at(uint32_t barrier, uint32_t parity) {
  while (!barrier_try_wait_at(barrier, parity)) {
  }
}
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  barrier_wait_at(shared_address(barrier), parity);
}
// Whether the phase has completed; does not wait.
__device__ inline bool barrier_test_at(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// A position in a ring of stages: index, and the parity that its barrier's wait takes.
template <int kStages>
struct Ring {
  static_assert(kStages >= 2, "a ring of one stage cannot be filled while it is read");
  int index = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// Orders ordinary writes to shared memory before accesses of the tensor cores and TMA.
__device__ inline void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier among `threads` threads of the block; ids 1 to 15 (0 is __syncthreads).
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts this warp's threads in without waiting.
__device__ inline void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace radix::sm90
