// What a kernel library does first: it registers its code, and asks for the GPUs.
#include "rocm/hip_shim.h"

extern "C" int hipGetDeviceCount(int* count);
extern "C" void** __hipRegisterFatBinary(const void* binary);

#define PROBE extern "C" __attribute__((visibility("default")))

static void** const module = __hipRegisterFatBinary("code");

// The runtime's number of GPUs; -1 without a runtime.
PROBE int probe_gpus() {
  int count = -1;
  return module && hipGetDeviceCount(&count) == 0 ? count : -1;
}
PROBE void probe_bundle(const char* path) {
  radix::hip::set_bundled({path});
}
PROBE const char* probe_path() {
  return radix::hip::runtime_path();
}
PROBE const char* probe_problem() {
  return radix::hip::runtime_problem();
}
