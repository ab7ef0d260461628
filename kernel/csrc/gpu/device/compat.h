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

#if defined(__HIP__)
// The value of another lane of the row of 16 by DPP, which goes through neither LDS nor memory. The controls are those
// of the ISA: which of its quad a lane reads, or that it reads the rotated or mirrored (half) row.
constexpr int kQuadXor1 = 0xb1, kQuadXor2 = 0x4e, kQuadXor3 = 0x1b;
constexpr int kRowRotate8 = 0x128, kRowMirror = 0x140, kHalfRowMirror = 0x141;

template <int kControl, class T>
__device__ inline T permute_row(T value) {
  constexpr int kWords = sizeof(T) / sizeof(int);
  static_assert(kWords * sizeof(int) == sizeof(T));
  int words[kWords];
  __builtin_memcpy(words, &value, sizeof(T));
#pragma unroll
  for (int i = 0; i < kWords; i++) words[i] = __builtin_amdgcn_mov_dpp(words[i], kControl, 0xf, 0xf, true);
  __builtin_memcpy(&value, words, sizeof(T));
  return value;
}

// The value of one lane, the same in all.
template <class T>
__device__ inline T read_lane(T value, int lane) {
  constexpr int kWords = sizeof(T) / sizeof(int);
  static_assert(kWords * sizeof(int) == sizeof(T));
  int words[kWords];
  __builtin_memcpy(words, &value, sizeof(T));
#pragma unroll
  for (int i = 0; i < kWords; i++) words[i] = __builtin_amdgcn_readlane(words[i], lane);
  __builtin_memcpy(&value, words, sizeof(T));
  return value;
}
#endif

template <class T>
__device__ inline T shuffle_xor(T value, int mask) {
#if defined(__HIP__)
  switch (mask) {
    case 1: return permute_row<kQuadXor1>(value);
    case 2: return permute_row<kQuadXor2>(value);
    case 4: return permute_row<kQuadXor3>(permute_row<kHalfRowMirror>(value));  // 7 ^ 3
    case 8: return permute_row<kRowRotate8>(value);
    default: return __shfl_xor(value, mask, RK_WARP);
  }
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

// n / d and n % d of sizes and positions: 0 <= n < 2^52, 0 < d. On AMD a division of 64-bit integers takes some hundred
// instructions. That of doubles is exact here: n / d is at least 1 / n of it below the next integer, which is more than
// its rounding.
__device__ inline int64_t quotient(int64_t n, int64_t d) {
#if defined(__HIP__)
  if ((n | d) >> 32 == 0) return static_cast<uint32_t>(n) / static_cast<uint32_t>(d);
  return static_cast<int64_t>(static_cast<double>(n) / static_cast<double>(d));
#else
  return n / d;
#endif
}
__device__ inline uint32_t quotient(uint32_t n, uint32_t d) {
  return n / d;
}
__device__ inline int64_t remainder(int64_t n, int64_t d) {
#if defined(__HIP__)
  return n - quotient(n, d) * d;
#else
  return n % d;
#endif
}

// e^x to the last bit or two, by AMD's own exponential of 2: what the product loses goes in afterwards, but for numbers
// whose power is about to leave the range of float.
__device__ inline float exponential(float x) {
#if defined(__HIP__)
  constexpr float kLog2E = 0x1.715476p+0f, kLog2ERest = 0x1.4ae0cp-26f, kLn2 = 0x1.62e43p-1f;
  const float scaled = x * kLog2E;
  const float lost = fmaf(x, kLog2ERest, fmaf(x, kLog2E, -scaled));
  const float power = __builtin_amdgcn_exp2f(scaled);
  return fabsf(x) < 88.5f ? fmaf(power, lost * kLn2, power) : power;
#else
  return expf(x);
#endif
}

}  // namespace radix::gpu
