// The GPU backend's own facts.
#include "common/backend.h"

#include <atomic>
#include <cstdio>
#include <cstring>

#include "gpu/device/fp8.h"

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

// A chip does not change: the runtime takes long to describe it, and is asked once for each.
DType native_fp8(rk_device device) {
#if defined(__HIP__)
  constexpr int kRemembered = 64;
  static std::atomic<int> answers[kRemembered];  // 0: not asked yet
  const bool remembered = device.id < kRemembered;
  if (remembered && answers[device.id] != 0) return static_cast<DType>(answers[device.id].load());
  char name[32];
  if (!rk_hip_arch_name(device.id, name, sizeof name))
    fail(RK_RUNTIME, "the HIP runtime does not say which chip GPU %d is", device.id);
  const bool fnuz = std::strncmp(name, "gfx94", 5) == 0;
  const DType found = fnuz ? DType::f8e4m3fnuz : DType::f8e4m3;
  if (remembered) answers[device.id] = static_cast<int>(found);
  return found;
#else
  (void)device;
  return DType::f8e4m3;
#endif
}

}  // namespace radix::backend
