// Copies from device to shared memory that a thread issues for itself (cp.async), of 16 bytes past L1 or of 4 through
// it.
#pragma once

#include "sm90/common/shared_memory.cuh"

namespace radix::sm90 {

__device__ inline void cp_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Zeros where not `valid`; nothing is read then.
__device__ inline void cp_async_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void cp_async_4(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ inline void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all but the last kPending groups of this thread have landed.
template <int kPending>
__device__ inline void cp_async_wait() {
  static_assert(kPending >= 0);
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Arrives once this thread's copies so far have landed; the barrier counts the thread among its arrivals.
__device__ inline void cp_async_mbarrier_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

}  // namespace radix::sm90
