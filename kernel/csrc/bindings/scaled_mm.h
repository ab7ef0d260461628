// The binding of a product with one scale a row of each operand, for each family that computes it.
#pragma once

#include "bindings/exchange.h"
#include "radix_kernels/gemm.h"

namespace radix::bind {

inline void def_fp8_scaled_mm(py::module_& m, const char* name,
                              rk_status (*run)(const rk_fp8_scaled_mm_args*, rk_stream)) {
  m.def(name, [run](py::handle mat_a, py::handle mat_b, py::handle scales_a, py::handle scales_b, py::handle bias,
                    int gate, bool static_weight, bool fast_accum, py::handle out) {
    Call call("fp8_scaled_mm");
    rk_fp8_scaled_mm_args args{sizeof args};
    args.gate = gate;
    args.static_weight = static_weight;
    args.fast_accum = fast_accum;
    args.mat_a = call.in("mat_a", mat_a);
    args.mat_b = call.in("mat_b", mat_b);
    args.scales_a = call.in("scales_a", scales_a);
    args.scales_b = call.in("scales_b", scales_b);
    args.bias = call.optional_in("bias", bias);
    args.out = call.out("out", out);
    call.run(run, args);
  });
}

inline void def_int8_scaled_mm(py::module_& m, const char* name,
                               rk_status (*run)(const rk_int8_scaled_mm_args*, rk_stream)) {
  m.def(name, [run](py::handle mat_a, py::handle mat_b, py::handle scales_a, py::handle scales_b, py::handle azp,
                    py::handle b_sums, py::handle bias, int gate, bool static_weight, py::handle out) {
    Call call("int8_scaled_mm");
    rk_int8_scaled_mm_args args{sizeof args};
    args.gate = gate;
    args.static_weight = static_weight;
    args.mat_a = call.in("mat_a", mat_a);
    args.mat_b = call.in("mat_b", mat_b);
    args.scales_a = call.in("scales_a", scales_a);
    args.scales_b = call.in("scales_b", scales_b);
    args.azp = call.optional_in("azp", azp);
    args.b_sums = call.optional_in("b_sums", b_sums);
    args.bias = call.optional_in("bias", bias);
    args.out = call.out("out", out);
    call.run(run, args);
  });
}

}  // namespace radix::bind
