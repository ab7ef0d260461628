#include "common/backend.h"

#include "cpu/isa.h"

namespace radix::backend {

const char* name() {
  return "cpu";
}

bool owns_device(rk_device device) {
  return device.type == RK_DEVICE_CPU;
}

const char* isa() {
  return cpu::isa_name(cpu::active_isa());
}

}  // namespace radix::backend
