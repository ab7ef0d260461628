// One spelling, CUDA's, for both GPU compilers: nvcc sees CUDA, clang -x hip sees HIP under CUDA's names.
//
// The width of a warp is a compile-time constant of the backend (32, or AMD's 64) and is written RK_WARP everywhere.
#pragma once

#if defined(__HIP__)
#include <hip/hip_runtime.h>

#include "rocm/hip_check.h"
#define RK_WARP 64
#define cudaError_t hipError_t
#define cudaSuccess hipSuccess
#define cudaStream_t hipStream_t
#define cudaGetErrorString hipGetErrorString
#define cudaGetDevice hipGetDevice
#define cudaSetDevice hipSetDevice
#define cudaGetDeviceCount hipGetDeviceCount
#define cudaDeviceGetAttribute hipDeviceGetAttribute
#define cudaDevAttrMultiProcessorCount static_cast<hipDeviceAttribute_t>(radix::hip::kAttributeMultiprocessorCount)
#define cudaLaunchKernel hipLaunchKernel
#define cudaFree hipFree
#define cudaMemset hipMemset
#define cudaDeviceSynchronize hipDeviceSynchronize
#define cudaHostRegister hipHostRegister
#define cudaHostRegisterMapped radix::hip::kHostRegisterMapped
#define cudaHostGetDevicePointer hipHostGetDevicePointer
#define cudaHostUnregister hipHostUnregister
#define cudaIpcMemHandle_t hipIpcMemHandle_t
#define cudaIpcGetMemHandle hipIpcGetMemHandle
#define cudaIpcOpenMemHandle hipIpcOpenMemHandle
#define cudaIpcCloseMemHandle hipIpcCloseMemHandle
#define cudaIpcMemLazyEnablePeerAccess radix::hip::kIpcLazyEnablePeerAccess
#else
#include <cuda_runtime.h>
#define RK_WARP 32
#endif

#include <cstdint>

namespace radix::gpu {

template <class T>
__device__ inline T shuffle_xor(T value, int mask) {
#if defined(__HIP__)
  return __shfl_xor(value, mask, RK_WARP);
#else
  return __shfl_xor_sync(0xffffffffu, value, mask, RK_WARP);
#endif
}

// The value of the lane `step` below; a lane without one gets its own.
template <class T>
__device__ inline T shuffle_up(T value, int step) {
#if defined(__HIP__)
  return __shfl_up(value, step, RK_WARP);
#else
  return __shfl_up_sync(0xffffffffu, value, step, RK_WARP);
#endif
}

// Every lane of the warp is here. AMD's lanes run together: only the compiler has to keep the order.
__device__ inline void sync_warp() {
#if defined(__HIP__)
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
#else
  __syncwarp();
#endif
}

}  // namespace radix::gpu
