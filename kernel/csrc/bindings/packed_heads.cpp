#include "bindings/packed_heads.h"

namespace radix::bind {

void bind_packed_heads(py::module_& m) {
  py::class_<PackedHeads>(m, "PackedHeads").def(py::init<const py::list&>()).def("run", &PackedHeads::run);
}

}  // namespace radix::bind
