// The checked tensor arguments of the collectives.
#pragma once

#include "common/check.h"
#include "radix_kernels/comm.h"

namespace radix {

// Contiguous and in host memory, whatever the wheel's own device.
inline Arg host_tensor(const char* op, const char* name, const rk_tensor* tensor) {
  const Arg arg(op, name, tensor);
  if (arg->device.type != RK_DEVICE_CPU)
    arg.reject(RK_INVALID, "is on %s, expected cpu", device_text(arg->device).c_str());
  arg.contiguous();
  return arg;
}

}  // namespace radix
