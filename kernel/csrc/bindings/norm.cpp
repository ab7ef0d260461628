#include "radix_kernels/norm.h"

#include "bindings/exchange.h"

namespace radix::bind {

void bind_norm(py::module_& m) {
  m.def("rmsnorm", [](py::handle input, py::handle weight, float eps, py::handle out) {
    Call call("rmsnorm");
    rk_rmsnorm_args args{sizeof args};
    args.eps = eps;
    args.input = call.in("input", input);
    args.weight = call.in("weight", weight);
    args.out = call.out("out", out);
    call.run(rk_rmsnorm, args);
  });
  m.def("fused_add_rmsnorm", [](py::handle input, py::handle residual, py::handle weight, float eps) {
    Call call("fused_add_rmsnorm");
    rk_fused_add_rmsnorm_args args{sizeof args};
    args.eps = eps;
    args.input = call.out("input", input);
    args.residual = call.out("residual", residual);
    args.weight = call.in("weight", weight);
    call.run(rk_fused_add_rmsnorm, args);
  });
}

}  // namespace radix::bind
