// Programmatic dependent launch: a kernel may start while the one before it in the stream still runs.
//
// Everything that an earlier kernel may have written is read, and everything is written, after pdl_wait(). Before it a
// kernel may set up barriers and fetch what no kernel in flight writes (weights). pdl_trigger() lets the next kernel's
// blocks take their places; its own pdl_wait() still waits for this whole grid.
#pragma once

#include <cuda_runtime.h>

#include "gpu/launch.h"

namespace radix::hopper {

__device__ inline void pdl_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ inline void pdl_trigger() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

struct LaunchShape {
  dim3 grid;
  int threads = 0;
  int shared_bytes = 0;  // dynamic; above 48 KiB the kernel's limit is raised
  int cluster = 1;       // blocks of a cluster, along x
};

// Launches with the attribute that lets pdl_wait() and pdl_trigger() work; on the tensors' device.
template <class... Params, class... Args>
void launch_dependent(const char* op, rk_device device, rk_stream stream, void (*kernel)(Params...),
                      const LaunchShape& shape, Args... args) {
  static_assert(sizeof...(Params) == sizeof...(Args));
  const gpu::DeviceScope scope(device);
  if (shape.shared_bytes > 48 << 10)
    gpu::check_gpu(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes), op);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = shape.cluster > 1 ? 2 : 1;
  const auto call = [&](Params... params) {
    void* pointers[] = {static_cast<void*>(&params)...};
    return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers);
  };
  gpu::check_gpu(call(args...), op);
}

}  // namespace radix::hopper
