#include "radix_kernels/gemm.h"

#include "bindings/exchange.h"
#include "bindings/scaled_mm.h"

namespace radix::bind {

void bind_gemm(py::module_& m) {
  m.def("linear_dense", [](py::handle x, py::handle weight, py::handle bias, py::handle residual, int gate,
                           bool static_weight, py::handle out) {
    Call call("linear");
    rk_linear_dense_args args{sizeof args};
    args.gate = gate;
    args.static_weight = static_weight;
    args.x = call.in("x", x);
    args.weight = call.in("weight", weight);
    args.bias = call.optional_in("bias", bias);
    args.residual = call.optional_in("residual", residual);
    args.out = call.out("out", out);
    call.run(rk_linear_dense, args);
  });
  def_fp8_scaled_mm(m, "fp8_scaled_mm", rk_fp8_scaled_mm);
  def_int8_scaled_mm(m, "int8_scaled_mm", rk_int8_scaled_mm);
  m.def("fp8_blockwise_scaled_mm", [](py::handle mat_a, py::handle mat_b, py::handle scales_a, py::handle scales_b,
                                      bool static_weight, py::handle out) {
    Call call("fp8_blockwise_scaled_mm");
    rk_fp8_blockwise_scaled_mm_args args{sizeof args};
    args.static_weight = static_weight;
    args.mat_a = call.in("mat_a", mat_a);
    args.mat_b = call.in("mat_b", mat_b);
    args.scales_a = call.in("scales_a", scales_a);
    args.scales_b = call.in("scales_b", scales_b);
    args.out = call.out("out", out);
    call.run(rk_fp8_blockwise_scaled_mm, args);
  });
  m.def("bmm_fp8", [](py::handle a, py::handle b, py::handle a_scale, py::handle b_scale, py::handle out) {
    Call call("bmm_fp8");
    rk_bmm_fp8_args args{sizeof args};
    args.a = call.in("A", a);
    args.b = call.in("B", b);
    args.a_scale = call.in("A_scale", a_scale);
    args.b_scale = call.in("B_scale", b_scale);
    args.out = call.out("out", out);
    call.run(rk_bmm_fp8, args);
  });
}

}  // namespace radix::bind
