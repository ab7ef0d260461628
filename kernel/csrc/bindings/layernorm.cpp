#include "radix_kernels/layernorm.h"

#include "bindings/exchange.h"

namespace radix::bind {

void bind_layernorm(py::module_& m) {
  m.def("layernorm", [](py::handle input, py::handle weight, py::handle bias, float eps, py::handle out) {
    Call call("layernorm");
    rk_layernorm_args args{sizeof args, eps};
    args.input = call.in("input", input);
    args.weight = call.optional_in("weight", weight);
    args.bias = call.optional_in("bias", bias);
    args.out = call.out("out", out);
    call.run(rk_layernorm, args);
  });
}

}  // namespace radix::bind
