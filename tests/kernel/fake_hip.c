// A HIP runtime that runs nothing and prints what it was asked for; its second launch fails.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
typedef struct {
  unsigned x, y, z;
} Dim3;
static const void* hosts[1024];
static const char* names[1024];
static int count, current, launches;
void** __hipRegisterFatBinary(const void* binary) {
  static void* module;
  return &module;
}
void __hipRegisterFunction(void** m, const void* host, char* device, const char* name, int limit, void* a, void* b,
                           void* c, void* d, int* e) {
  hosts[count] = host;
  names[count++] = name;
}
int hipGetDeviceCount(int* out) {
  *out = 2;
  return 0;
}
int hipGetDevice(int* out) {
  *out = current;
  return 0;
}
int hipSetDevice(int device) {
  current = device;
  printf("device %d\n", device);
  return 0;
}
const char* hipGetErrorString(int error) {
  return error == 9 ? "fake invalid launch" : "?";
}
int hipLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** args, size_t shared, void* stream) {
  for (int i = 0; i < count; i++)
    if (hosts[i] == kernel)
      printf("%s|%u,%u,%u|%u,%u,%u|%zu|%zu|%u\n", names[i], grid.x, grid.y, grid.z, block.x, block.y, block.z, shared,
             (size_t)stream, *(unsigned*)args[2]);
  return launches++ ? 9 : 0;
}
