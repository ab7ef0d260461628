#include "radix_kernels/library.h"

#include "common/backend.h"
#include "common/error.h"

int32_t rk_abi_version(void) {
  return RK_ABI_VERSION;
}

const char* rk_version(void) {
  return RADIX_VERSION;
}

const char* rk_backend(void) {
  return radix::backend::name();
}

rk_status rk_isa(const char** name) {
  return radix::guard([&] { *name = radix::backend::isa(); });
}
