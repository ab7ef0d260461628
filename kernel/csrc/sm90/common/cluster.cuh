// Blocks of one cluster: their barrier, and reads of each other's shared memory.
#pragma once

#include "sm90/common/mbarrier.cuh"

namespace radix::sm90 {

__device__ inline int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Every thread of every block arrives; what they wrote before is seen after the wait.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Execution alone: orders no memory, and so does not wait for stores on their way.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_sync_relaxed() {
  cluster_arrive_relaxed();
  cluster_wait();
}

// The address, in block `rank`, of what `shared` is in this one.
__device__ inline uint32_t remote_address(const void* shared, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
  return address;
}
// Arrives at the barrier that block `rank` has where this block has `barrier`.
__device__ inline void barrier_arrive_remote(const uint64_t* barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_address(barrier, rank)) : "memory");
}
__device__ inline void barrier_arrive_remote_at(uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}
// A warp's arrival at the barrier that each of the cluster's `blocks` blocks has there; 1: there is no cluster.
__device__ inline void barrier_arrive_warp(uint64_t* barrier, int blocks) {
  const int lane = threadIdx.x % 32;
  if (blocks == 1) {
    barrier_arrive_warp(barrier);
  } else if constexpr (kWarpArrivals > 1) {
    for (int rank = 0; rank < blocks; rank++) barrier_arrive_remote(barrier, rank);
  } else if (lane < blocks) {
    barrier_arrive_remote(barrier, lane);
  }
}
// A warp's arrival at that of blocks first, first + step, ..., which see afterwards (barrier_wait_published) what this
// warp wrote to its own shared memory. Fences of shared memory alone: they do not wait for stores to global memory.
__device__ inline void barrier_publish_warp(const uint64_t* barrier, int blocks, int first, int step) {
  __syncwarp();
  const auto arrive = [&](int i) {
    asm volatile(
        "fence.release.sync_restrict::shared::cta.cluster;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote_address(barrier, first + i * step))
        : "memory");
  };
  const int lane = threadIdx.x % 32;
  if constexpr (kWarpArrivals > 1) {
    for (int i = 0; i < blocks; i++) arrive(i);
  } else if (lane < blocks) {
    arrive(lane);
  }
}
__device__ inline void barrier_wait_published(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
}
__device__ inline float4 load_remote(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// 16 bytes to `address` in another block's shared memory; they count at `barrier` there, which says when they are seen.
__device__ inline void store_async(uint32_t address, const uint4& v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}
// The wait that sees what another block's threads wrote to this block's shared memory.
__device__ inline void barrier_wait_cluster(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

}  // namespace radix::sm90
