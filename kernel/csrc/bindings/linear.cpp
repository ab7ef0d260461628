#include "radix_kernels/linear.h"

#include "bindings/packed_desc.h"

namespace radix::bind {

void bind_linear(py::module_& m) {
  py::class_<PackedDesc>(m, "PackedDesc")
      .def(py::init<int64_t, int64_t, const std::string&, uint32_t, uint32_t, const std::string&, bool, bool>())
      .def_readonly("nbytes", &PackedDesc::bytes)
      .def_property_readonly("layout", &PackedDesc::layout);
  m.def("pack_weight", [](py::handle w, py::handle scales, py::handle zeros, py::handle mins, py::handle sub_scales,
                          py::handle sub_mins, const PackedDesc& desc, py::handle packed) {
    Call call("pack_weight");
    rk_pack_weight_args args{sizeof args, &desc.desc};
    args.weight = call.in("w", w);
    args.scales = call.optional_in("scales", scales);
    args.zeros = call.optional_in("zeros", zeros);
    args.mins = call.optional_in("mins", mins);
    args.sub_scales = call.optional_in("sub_scales", sub_scales);
    args.sub_mins = call.optional_in("sub_mins", sub_mins);
    args.packed = call.out("packed", packed);
    call.run(rk_pack_weight, args);
  });
  m.def("unpack_weight", [](py::handle packed, const PackedDesc& desc, py::handle w, py::handle scales,
                            py::handle zeros, py::handle mins, py::handle sub_scales, py::handle sub_mins) {
    Call call("unpack_weight");
    rk_unpack_weight_args args{sizeof args, &desc.desc};
    args.packed = call.in("packed", packed);
    args.weight = call.out("w", w);
    args.scales = call.optional_out("scales", scales);
    args.zeros = call.optional_out("zeros", zeros);
    args.mins = call.optional_out("mins", mins);
    args.sub_scales = call.optional_out("sub_scales", sub_scales);
    args.sub_mins = call.optional_out("sub_mins", sub_mins);
    call.run(rk_unpack_weight, args);
  });
  m.def(
      "linear_packed",
      [](py::handle x, py::handle packed, const PackedDesc& desc, py::handle bias, py::handle residual, int gate,
         py::handle out, bool keep_x) {
        Call call("linear");
        rk_linear_args args{sizeof args, &desc.desc};
        args.x = call.in("x", x);
        args.packed = call.in("weight", packed);
        args.bias = call.optional_in("bias", bias);
        args.residual = call.optional_in("residual", residual);
        args.gate = gate;
        args.out = call.out("out", out);
        args.keep_x = keep_x;
        call.run(rk_linear, args);
      },
      py::arg("x"), py::arg("packed"), py::arg("desc"), py::arg("bias"), py::arg("residual"), py::arg("gate"),
      py::arg("out"), py::arg("keep_x") = false);
  // A GPU's library has no such kernel: there the outputs are written.
  if (std::string(rk_backend()) == "cpu")
    m.def("linear_argmax",
          [](py::handle x, py::handle packed, const PackedDesc& desc, py::handle ids, py::handle maxima) {
            Call call("linear_argmax");
            rk_linear_argmax_args args{sizeof args, &desc.desc};
            args.x = call.in("x", x);
            args.packed = call.in("weight", packed);
            args.ids = call.out("ids", ids);
            args.maxima = call.out("maxima", maxima);
            call.run(rk_linear_argmax, args);
          });
  m.def("embedding_packed", [](py::handle ids, py::handle packed, const PackedDesc& desc, py::handle out) {
    Call call("embedding");
    rk_embedding_args args{sizeof args, &desc.desc};
    args.ids = call.optional_in("ids", ids);
    args.packed = call.in("weight", packed);
    args.out = call.out("out", out);
    call.run(rk_embedding, args);
  });
}

}  // namespace radix::bind
