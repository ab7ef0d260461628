// The GPU backend's own facts.
#include "common/backend.h"

#include <cstdio>

#include "gpu/device/compat.h"

#if defined(__HIP__)
extern "C" bool rk_hip_arch_name(int device, char* name, size_t bytes);  // rocm/hip_shim.cpp
#endif

namespace radix::backend {

const char* name() {
#if defined(__HIP__)
  return "rocm";
#else
  return "cuda";
#endif
}

bool owns_device(rk_device device) {
#if defined(__HIP__)
  return device.type == RK_DEVICE_ROCM;
#else
  return device.type == RK_DEVICE_CUDA;
#endif
}

const char* isa() {
  int count = 0, device = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
#if defined(__HIP__)
  if (status == radix::hip::kErrorNotInitialized) return "no HIP runtime";
#endif
  if (status != cudaSuccess || count == 0) return "no device";
  static char text[32];
  (void)cudaGetDevice(&device);
#if defined(__HIP__)
  if (!rk_hip_arch_name(device, text, sizeof text)) return "gfx";
#else
  int major = 0, minor = 0;
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  std::snprintf(text, sizeof text, "sm_%d%d", major, minor);
#endif
  return text;
}

}  // namespace radix::backend
