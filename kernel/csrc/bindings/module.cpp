// The Python module `_bind`: one function an op, with the arguments of the public Python function in its order, all
// positional, every output passed (last); nothing is allocated here. families.inc is written by CMake: RK_FAMILY(name)
// for each family of the backend.
#include <pybind11/pybind11.h>

#include "bindings/exchange.h"

namespace radix::bind {
#define RK_FAMILY(name) void bind_##name(py::module_& m);
#include "families.inc"
#undef RK_FAMILY
}  // namespace radix::bind

PYBIND11_MODULE(_bind, m) {
  using namespace radix::bind;
  if (rk_abi_version() != RK_ABI_VERSION) throw py::import_error("libradix_kernels.so is of another ABI version");
  m.attr("abi_version") = rk_abi_version();
  m.attr("version") = rk_version();
  m.attr("backend") = rk_backend();
  m.def("isa", [] {
    const char* name = nullptr;
    if (const rk_status status = rk_isa(&name)) raise(status, rk_last_error());
    return name;
  });
#define RK_FAMILY(name) bind_##name(m);
#include "families.inc"
#undef RK_FAMILY
}
