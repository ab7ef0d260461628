// A libtorch_hip: a library that calls the HIP runtime it is linked with.
int hipGetDeviceCount(int* count);

int torch_gpus(void) {
  int count = -1;
  return hipGetDeviceCount(&count) ? -1 : count;
}
