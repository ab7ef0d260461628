#include "radix_kernels/hip.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/exchange.h"

namespace radix::bind {

void bind_hip(py::module_& m) {
  m.def("set_bundled_hip", [](const std::vector<std::string>& paths) {
    std::vector<const char*> texts;
    for (const std::string& path : paths) texts.push_back(path.c_str());
    const rk_status status = rk_hip_set_bundled(texts.data(), static_cast<int32_t>(texts.size()));
    if (status != RK_OK) raise(status, rk_last_error());
  });
  m.def("hip_runtime", [] {
    const char* path = nullptr;
    const char* problem = nullptr;
    if (const rk_status status = rk_hip_runtime(&path, &problem)) raise(status, rk_last_error());
    return std::pair<std::string, std::string>(path, problem);
  });
}

}  // namespace radix::bind
