// Launching: on the tensors' device, with the error of this very launch.
#pragma once

#include <atomic>
#include <map>
#include <tuple>
#include <utility>

#include "common/error.h"
#include "gpu/device/compat.h"
#include "radix_kernels/types.h"

namespace radix::gpu {

inline void check_gpu(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(RK_RUNTIME, "%s: %s", what, cudaGetErrorString(error));
}

// An attribute that is never 0, asked for once a device: the driver takes about as long to answer as to launch.
template <auto kAttribute>
int device_attribute(rk_device device, const char* what) {
  constexpr int kRemembered = 64;
  static std::atomic<int> answers[kRemembered];  // 0: not asked yet
  const bool remembered = device.id < kRemembered;
  if (remembered) {
    const int answer = answers[device.id].load(std::memory_order_relaxed);
    if (answer != 0) return answer;
  }
  int answer = 0;
  check_gpu(cudaDeviceGetAttribute(&answer, kAttribute, device.id), what);
  if (remembered) answers[device.id].store(answer, std::memory_order_relaxed);
  return answer;
}

inline int multiprocessors(rk_device device) {
  return device_attribute<cudaDevAttrMultiProcessorCount>(device, "multiprocessors");
}

// Makes the tensors' device current for the time of a launch.
class DeviceScope {
 public:
  explicit DeviceScope(rk_device device) {
    check_gpu(cudaGetDevice(&previous_), "current device");
    if (previous_ == device.id) return;
    check_gpu(cudaSetDevice(device.id), "set device");
    changed_ = true;
  }
  ~DeviceScope() {
    if (changed_) (void)cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

template <class... Params, class... Args>
void launch(const char* op, rk_device device, rk_stream stream, void (*kernel)(Params...), dim3 grid, dim3 block,
            Args... args) {
  static_assert(sizeof...(Params) == sizeof...(Args));
  const DeviceScope scope(device);
  // The launch's own status: GetLastError may hold somebody else's.
  const auto call = [&](Params... params) {
    void* pointers[] = {static_cast<void*>(&params)...};
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers, 0,
                            reinterpret_cast<cudaStream_t>(stream));
  };
  check_gpu(call(args...), op);
}

#if !defined(__HIP__)
// Raises an attribute of a kernel to `value` on the current device, which is `device`. Each thread asks the driver once
// for what it has not raised so far.
template <class Kernel>
void raise_kernel_attribute(const char* op, rk_device device, Kernel* kernel, cudaFuncAttribute attribute, int value) {
  thread_local std::map<std::tuple<const void*, int, cudaFuncAttribute>, int> raised;
  const void* address = reinterpret_cast<const void*>(kernel);
  int& known = raised[{address, device.id, attribute}];
  if (value <= known) return;
  check_gpu(cudaFuncSetAttribute(address, attribute, value), op);
  known = value;
}

struct LaunchShape {
  dim3 grid, threads;
  int shared_bytes = 0;      // dynamic; above 48 KiB the kernel's limit is raised
  int cluster = 1;           // blocks of a cluster, along x (Hopper)
  bool cooperative = false;  // all blocks run at once, so they may wait for each other
};

// Clusters of a kernel, of `shape` but for its grid, that fit on the device at once. Each thread asks the driver once
// for a kernel on a device.
template <class... Params>
int active_clusters(const char* op, rk_device device, void (*kernel)(Params...), const LaunchShape& shape) {
  thread_local std::map<std::pair<const void*, int>, int> known;
  const void* address = reinterpret_cast<const void*>(kernel);
  const auto place = known.find({address, device.id});
  if (place != known.end()) return place->second;
  const DeviceScope scope(device);
  raise_kernel_attribute(op, device, kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int count = 0;
  check_gpu(cudaOccupancyMaxActiveClusters(&count, kernel, &config), op);
  known[{address, device.id}] = count;
  return count;
}

// Whether a kernel waits in wait_for_previous(): its code is for Hopper or later, not what the driver makes of an older
// chip's PTX on a chip that there is no machine code for. Each thread asks the driver once for a kernel on a device.
inline bool waits_for_previous(const char* op, rk_device device, const void* kernel) {
  thread_local std::map<std::pair<const void*, int>, bool> known;
  const auto [place, is_new] = known.try_emplace({kernel, device.id}, false);
  if (is_new) {
    cudaFuncAttributes attributes = {};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) known.erase(place);
    check_gpu(status, op);
    place->second = attributes.ptxVersion >= 90;
  }
  return place->second;
}

// The same for kernels that begin with wait_for_previous(): where they do wait, they may start while the kernel before
// them in the stream still runs (programmatic dependent launch), which hides the time of a launch.
template <class... Params, class... Args>
void launch_dependent(const char* op, rk_device device, rk_stream stream, void (*kernel)(Params...),
                      const LaunchShape& shape, Args... args) {
  static_assert(sizeof...(Params) == sizeof...(Args));
  const DeviceScope scope(device);
  if (shape.shared_bytes > 48 << 10)
    raise_kernel_attribute(op, device, kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (waits_for_previous(op, device, reinterpret_cast<const void*>(kernel))) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  if (shape.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  const auto call = [&](Params... params) {
    void* pointers[] = {static_cast<void*>(&params)...};
    return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers);
  };
  check_gpu(call(args...), op);
}
#endif

// For blocks without dynamic shared memory; on AMD an ordinary launch.
template <class... Params, class... Args>
void launch_dependent(const char* op, rk_device device, rk_stream stream, void (*kernel)(Params...), dim3 grid,
                      dim3 block, Args... args) {
#if defined(__HIP__)
  launch(op, device, stream, kernel, grid, block, args...);
#else
  launch_dependent(op, device, stream, kernel, LaunchShape{grid, block}, args...);
#endif
}

// Every thread of a kernel for launch_dependent() calls it before it reads or writes what other kernels touch; what
// nothing in flight writes (weights) may be read before. The next kernel's blocks may take their places from here on:
// their own call waits for this whole grid.
__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Enough blocks for n items, at most `most`: kernels stride over the rest.
inline unsigned blocks_for(int64_t n, int64_t per_block, int64_t most = 1 << 20) {
  const int64_t blocks = (n + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < most ? blocks : most);
}

}  // namespace radix::gpu
