// The GPU backend's own facts.
#include "common/backend.h"

#include <cstdio>

#include "gpu/device/compat.h"

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
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return "no device";
#if defined(__HIP__)
  return "gfx";  // the runtime picks among the code objects; their names are in the build's facts
#else
  static char text[32];
  int device = 0, major = 0, minor = 0;
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  std::snprintf(text, sizeof text, "sm_%d%d", major, minor);
  return text;
#endif
}

}  // namespace radix::backend
