// Enough of CUDA's names for g++ to compile csrc/gpu's collectives and KV store: a GPU thread is a thread of this
// process, or a turn of a loop.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __shared__ static thread_local  // of what a thread reads back only; gpu/device/reduce.h is replaced

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

void block_barrier();  // harness.h
inline void __syncthreads() {
  block_barrier();
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int, int) {
  std::abort();  // no warps here
}
inline void __syncwarp() {
  std::abort();
}
inline void __threadfence_system() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

template <class To, class From>
inline To reinterpret_bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline uint32_t __float_as_uint(float x) {
  return reinterpret_bits<uint32_t>(x);
}
inline float __uint_as_float(uint32_t x) {
  return reinterpret_bits<float>(x);
}

// A look that finds nothing must not keep the others from their core.
template <class T>
inline T load_and_yield(const T* p) {
  static thread_local unsigned looks = 0;
  if (++looks % 8 == 0) sched_yield();
  T value;
  __atomic_load(const_cast<T*>(p), &value, __ATOMIC_RELAXED);
  return value;
}
#define __atomic_load_n(p, order) load_and_yield(p)

inline uint64_t __builtin_amdgcn_s_memrealtime() {  // tens of nanoseconds
  return std::chrono::steady_clock::now().time_since_epoch().count() / 10;
}

// Host functions that the file's own host code names; nothing here calls them.
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrMultiProcessorCount };
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeCooperative
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
// How often the driver was asked for an attribute, and told one.
inline std::atomic<int> attributes_asked{0}, attributes_told{0};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
    int cooperative;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
inline const char* cudaGetErrorString(cudaError_t) {
  return "";
}
inline cudaError_t cudaGetDevice(int*) {
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  attributes_asked++;
  *value = 9;
  return cudaSuccess;
}
inline cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  attributes_told++;
  return cudaSuccess;
}
struct cudaFuncAttributes {
  int ptxVersion;
};
// What kernels have been compiled for: of those that nobody has asked about yet.
inline int compiled_for = 90;
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes_asked++;
  attributes->ptxVersion = compiled_for;
  return cudaSuccess;
}
// Launches that may begin while the kernel ahead runs.
inline std::atomic<int> early_launches{0};
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  for (unsigned i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization) early_launches++;
  return cudaSuccess;
}
