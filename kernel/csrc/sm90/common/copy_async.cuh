// Copies of 16 bytes from device to shared memory by each thread for itself (cp.async), past L1.
#pragma once

#include "sm90/common/mbarrier.cuh"

namespace radix::sm90 {

// Zeros where `there` is false; nothing is read then.
__device__ inline void copy_async_16(uint32_t shared, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ inline void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until all but the last kPending groups of this thread have landed.
template <int kPending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace radix::sm90
