#include "bindings/packed_experts.h"

namespace radix::bind {

void bind_packed_experts(py::module_& m) {
  py::class_<PackedExperts>(m, "PackedExperts")
      .def(py::init<const py::list&>())
      .def("workspace_size", &PackedExperts::workspace_size)
      .def("run", &PackedExperts::run);
}

}  // namespace radix::bind
