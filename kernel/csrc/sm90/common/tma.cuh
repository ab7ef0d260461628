// Copies of tensor tiles between device and shared memory by TMA.
//
// Host: make_tensor_map describes a matrix and the box that one copy moves. The driver's encoder is found through the
// runtime, so that nothing links libcuda. A map is passed to the kernel by value as `const __grid_constant__
// TensorMap`. Device: one thread issues a copy; it completes on an mbarrier that expects the box's bytes. What lies
// outside of the matrix arrives as zeros and counts as bytes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "gpu/device/launch.h"
#include "sm90/common/mbarrier.cuh"

namespace radix::sm90 {

using TensorMap = CUtensorMap;

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    gpu::check_gpu(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result),
        "cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess || !entry)
      fail(RK_RUNTIME, "the CUDA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return found;
}

// `rank` dimensions, innermost first: sizes and box in elements, strides in bytes of dimensions 1 and up (multiples of
// 16). Rows of the box, box[0] elements of 128 bytes at most with kSwizzle128, lie one below the other.
struct TileShape {
  int rank;
  uint64_t size[5];
  uint64_t stride[4];
  uint32_t box[5];
};

// A dimension of one element may have any stride; a map wants one it could use.
inline uint64_t map_stride(int64_t stride, int64_t count, int64_t otherwise = 16) {
  return static_cast<uint64_t>(count > 1 ? stride : otherwise);
}

inline TensorMap make_tensor_map(const void* data, CUtensorMapDataType type, const TileShape& shape,
                                 CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  TensorMap map;
  const uint32_t ones[5] = {1, 1, 1, 1, 1};
  const CUresult status =
      encode_tiled()(&map, type, shape.rank, const_cast<void*>(data), shape.size, shape.stride, shape.box, ones,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) fail(RK_RUNTIME, "cuTensorMapEncodeTiled: error %d", static_cast<int>(status));
  return map;
}

__device__ inline void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The 128 bytes around an address in device memory.
__device__ inline void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// How long L2 keeps what is copied.
enum class L2Keep : uint64_t {
  first_out = 0x12f0000000000000,
  normal = 0x1000000000000000,
  last_out = 0x14f0000000000000
};

__device__ inline void tma_load_2d(void* shared, const TensorMap* map, uint64_t* barrier, int x, int y,
                                   L2Keep keep = L2Keep::normal) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
      "%4}], "
      "[%2], %5;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "l"(static_cast<uint64_t>(keep))
      : "memory");
}
__device__ inline void tma_load_3d(void* shared, const TensorMap* map, uint64_t* barrier, int x, int y, int z,
                                   L2Keep keep = L2Keep::normal) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5}], [%2], %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "l"(static_cast<uint64_t>(keep))
      : "memory");
}

__device__ inline void tma_load_4d(void* shared, const TensorMap* map, uint64_t* barrier, int x, int y, int z, int w,
                                   L2Keep keep = L2Keep::normal) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "l"(static_cast<uint64_t>(keep))
      : "memory");
}

// To every block of the cluster whose bit is set in `blocks`: at the same place, completing on each one's own barrier.
__device__ inline void tma_multicast_2d(void* shared, const TensorMap* map, uint64_t* barrier, uint16_t blocks, int x,
                                        int y, L2Keep keep = L2Keep::normal) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%4, %5}], [%2], %3, %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "h"(blocks), "r"(x), "r"(y), "l"(static_cast<uint64_t>(keep))
      : "memory");
}

__device__ inline void tma_multicast_3d(void* shared, const TensorMap* map, uint64_t* barrier, uint16_t blocks, int x,
                                        int y, int z, L2Keep keep = L2Keep::normal) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%4, %5, %6}], [%2], %3, %7;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "h"(blocks), "r"(x), "r"(y), "r"(z), "l"(static_cast<uint64_t>(keep))
      : "memory");
}

__device__ inline void tma_multicast_4d(void* shared, const TensorMap* map, uint64_t* barrier, uint16_t blocks, int x,
                                        int y, int z, int w, L2Keep keep = L2Keep::normal) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%4, %5, %6, %7}], [%2], %3, %8;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "h"(blocks), "r"(x), "r"(y), "r"(z), "r"(w),
      "l"(static_cast<uint64_t>(keep))
      : "memory");
}

// `bytes` that follow each other, a multiple of 16; both addresses are multiples of 16.
__device__ inline void bulk_load_at(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier,
                                    L2Keep keep = L2Keep::normal) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(static_cast<uint64_t>(keep))
      : "memory");
}
__device__ inline void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                                 L2Keep keep = L2Keep::normal) {
  bulk_load_at(shared_address(shared), global, bytes, shared_address(barrier), keep);
}

// The way back. Between the writes to shared memory and this: fence_async_shared() by the writers, then a barrier.
__device__ inline void tma_store_3d(const TensorMap* map, const void* shared, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ inline void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most kLeft committed stores have still to read their shared memory.
template <int kLeft>
__device__ inline void tma_store_wait_read() {
  static_assert(kLeft >= 0);
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

// Until the committed stores are complete: others may read what they wrote.
__device__ inline void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace radix::sm90
