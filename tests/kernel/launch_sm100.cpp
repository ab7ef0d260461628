// The FP8 product of sm_100 with a CUDA runtime that notes what it is asked, in place of a GPU: the object of
// sm100/scaled_mm/fp8.cu and this file are a program. Prints a line for each launch and what the product said.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <initializer_list>

#include "common/error.h"
#include "sm80/scaled_mm/problem.h"

namespace {

cudaError_t pending = cudaSuccess;      // as the runtime keeps it for a thread, until it is asked for
cudaError_t launch_says = cudaSuccess;  // of the next launches
int most_shared = 0;                    // bytes, that the kernel's limit is raised to

// Of a launch in the form kernel<<<...>>>(...).
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} pushed;

CUresult encode(...) {
  return CUDA_SUCCESS;
}

alignas(128) char memory[1 << 20];

void multiply(int tokens, bool is_f16, cudaError_t before, cudaError_t launch) {
  radix::scaled_mm::Problem q = {};
  q.op = "fp8_scaled_mm";
  q.x = q.weight = memory;
  q.x_step = q.weight_step = 512;
  q.m = tokens;
  q.n = 528;
  q.k = 512;
  q.epilogue.out = memory;
  q.epilogue.out_step = q.n;
  q.epilogue.out_is_f16 = is_f16;
  q.epilogue.scale_x = q.epilogue.scale_w = reinterpret_cast<const float*>(memory);
  pending = before;
  launch_says = launch;
  try {
    radix::scaled_mm::run_fp8_sm100(q);
    std::printf("ok");
  } catch (const radix::Error& error) {
    std::printf("%s", error.text.c_str());
  }
  std::printf(", pending %d\n", pending);
}

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 148;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) most_shared = value;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(encode);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice ? "no kernel image" : "another error";
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = pending;
  pending = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() {
  return pending;
}
cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t) {
  const bool fits = shared <= static_cast<size_t>(most_shared);
  std::printf("%u x %u x %u of %u, %s: ", grid.x, grid.y, grid.z, block.x, fits ? "fits" : "too much shared memory");
  if (launch_says != cudaSuccess) pending = launch_says;
  return launch_says;
}

// What the compiler's own code asks for.
cudaError_t __cudaLaunchKernel(void* kernel, dim3 grid, dim3 block, void** values, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, values, shared, stream);
}
cudaError_t __cudaGetKernel(void** kernel, const void* host) {
  *kernel = const_cast<void*>(host);
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

}  // extern "C"

int main() {
  for (const bool is_f16 : {false, true}) {
    multiply(1, is_f16, cudaSuccess, cudaSuccess);
    multiply(300, is_f16, cudaErrorInvalidValue, cudaSuccess);
    multiply(300, is_f16, cudaSuccess, cudaErrorNoKernelImageForDevice);
  }
}
