#include "radix_kernels/quantize.h"

#include "bindings/exchange.h"

namespace radix::bind {

void bind_quantize(py::module_& m) {
  m.def("per_tensor_quant_fp8", [](py::handle input, bool is_static, py::handle out, py::handle scale) {
    Call call("per_tensor_quant_fp8");
    rk_per_tensor_quant_fp8_args args{sizeof args};
    args.is_static = is_static;
    args.input = call.in("input", input);
    args.out = call.out("out", out);
    args.scale = is_static ? call.in("scale", scale) : call.out("scale", scale);
    call.run(rk_per_tensor_quant_fp8, args);
  });
  m.def("per_token_quant_fp8", [](py::handle input, int group_size, bool gated, py::handle out, py::handle scales) {
    Call call("per_token_quant_fp8");
    rk_per_token_quant_fp8_args args{sizeof args};
    args.group_size = group_size;
    args.gated = gated;
    args.input = call.in("input", input);
    args.out = call.out("out", out);
    args.scales = call.out("scales", scales);
    call.run(rk_per_token_quant_fp8, args);
  });
  m.def("rmsnorm_quant_fp8", [](py::handle input, py::handle residual, py::handle weight, int group_size, float eps,
                                py::handle out, py::handle scales) {
    Call call("rmsnorm_quant_fp8");
    rk_rmsnorm_quant_fp8_args args{sizeof args};
    args.group_size = group_size;
    args.eps = eps;
    args.input = call.in("input", input);
    if (!residual.is_none()) args.residual = call.out("residual", residual);
    args.weight = call.in("weight", weight);
    args.out = call.out("out", out);
    args.scales = call.out("scales", scales);
    call.run(rk_rmsnorm_quant_fp8, args);
  });
  m.def("per_token_quant_int8", [](py::handle input, bool gated, py::handle out, py::handle scales) {
    Call call("per_token_quant_int8");
    rk_per_token_quant_int8_args args{sizeof args};
    args.gated = gated;
    args.input = call.in("input", input);
    args.out = call.out("out", out);
    args.scales = call.out("scales", scales);
    call.run(rk_per_token_quant_int8, args);
  });
  m.def("rmsnorm_quant_int8",
        [](py::handle input, py::handle residual, py::handle weight, float eps, py::handle out, py::handle scales) {
          Call call("rmsnorm_quant_int8");
          rk_rmsnorm_quant_int8_args args{sizeof args};
          args.eps = eps;
          args.input = call.in("input", input);
          if (!residual.is_none()) args.residual = call.out("residual", residual);
          args.weight = call.in("weight", weight);
          args.out = call.out("out", out);
          args.scales = call.out("scales", scales);
          call.run(rk_rmsnorm_quant_int8, args);
        });
}

}  // namespace radix::bind
