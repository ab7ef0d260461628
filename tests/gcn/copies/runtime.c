// The least that the library asks of a HIP runtime. Each copy of it has a number of GPUs of its own (GPUS), by which a
// test tells which of them it reached.
#include <stddef.h>

static int modules = 0;

int hipGetDeviceCount(int* count) {
  *count = GPUS;
  return 0;
}

void** __hipRegisterFatBinary(const void* data) {
  modules++;
  return (void**)data;
}

void __hipRegisterFunction(void** module, const void* host, char* name, const char* device, int threads, void* a,
                           void* b, void* c, void* d, int* e) {
  (void)module, (void)host, (void)name, (void)device, (void)threads, (void)a, (void)b, (void)c, (void)d, (void)e;
}

int fake_modules(void) {
  return modules;
}

#ifndef HIP_5
int hipGetDevicePropertiesR0600(void* properties, int device) {
  (void)properties, (void)device;
  return 1;
}
#endif
