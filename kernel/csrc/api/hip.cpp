// C entries of the HIP runtime's choice.
#include "radix_kernels/hip.h"

#include <string>
#include <vector>

#include "common/error.h"
#include "rocm/hip_shim.h"

rk_status rk_hip_set_bundled(const char* const* paths, int32_t count) {
  return radix::guard([&] { radix::hip::set_bundled(std::vector<std::string>(paths, paths + count)); });
}

rk_status rk_hip_runtime(const char** path, const char** problem) {
  return radix::guard([&] {
    *path = radix::hip::runtime_path();
    *problem = radix::hip::runtime_problem();
  });
}
