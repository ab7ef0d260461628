#include "radix_kernels/linear.h"

#include <string>

#include "bindings/exchange.h"

namespace radix::bind {
namespace {

rk_packed_desc describe(rk_dtype dtype, int64_t n, int64_t k, int64_t* bytes) {
  rk_packed_desc desc{sizeof desc};
  desc.dtype = dtype;
  desc.n = n;
  desc.k = k;
  if (const rk_status status = rk_packed_weight_info(&desc, bytes)) raise(status, rk_last_error());
  return desc;
}

rk_packed_desc describe(rk_dtype dtype, int64_t n, int64_t k) {
  int64_t bytes;
  return describe(dtype, n, k, &bytes);
}

rk_dtype dtype_named(const std::string& name) {
  if (name == "bfloat16") return {RK_CODE_BFLOAT, 16, 1};
  if (name == "float16") return {RK_CODE_FLOAT, 16, 1};
  if (name == "float32") return {RK_CODE_FLOAT, 32, 1};
  throw py::type_error("pack_weight: w has dtype " + name + ", expected bfloat16, float16 or float32");
}

}  // namespace

void bind_linear(py::module_& m) {
  m.def("packed_weight_size", [](int64_t n, int64_t k, const std::string& dtype) {
    int64_t bytes;
    describe(dtype_named(dtype), n, k, &bytes);
    return bytes;
  });
  m.def("packed_weight_layout", [](const std::string& dtype) {
    return describe(dtype_named(dtype), 1, 1).layout == RK_LAYOUT_PAIRS16 ? "pairs16" : "lanes16";
  });
  m.def("pack_weight", [](py::handle w, py::handle packed) {
    Call call("pack_weight");
    rk_pack_weight_args args{sizeof args};
    args.weight = call.in("w", w);
    args.packed = call.out("packed", packed);
    if (args.weight->ndim != 2) throw py::value_error("pack_weight: w must have 2 dimensions");
    const auto desc = describe(args.weight->dtype, args.weight->shape[0], args.weight->shape[1]);
    args.desc = &desc;
    call.run(rk_pack_weight, args);
  });
  m.def("unpack_weight", [](py::handle packed, py::handle w) {
    Call call("unpack_weight");
    rk_unpack_weight_args args{sizeof args};
    args.packed = call.in("packed", packed);
    args.weight = call.out("w", w);
    if (args.weight->ndim != 2) throw py::value_error("unpack_weight: w must have 2 dimensions");
    const auto desc = describe(args.weight->dtype, args.weight->shape[0], args.weight->shape[1]);
    args.desc = &desc;
    call.run(rk_unpack_weight, args);
  });
  m.def("linear_packed", [](py::handle x, py::handle packed, int64_t n, int64_t k, py::handle bias, py::handle out) {
    Call call("linear");
    rk_linear_args args{sizeof args};
    args.x = call.in("x", x);
    args.packed = call.in("weight", packed);
    args.bias = call.optional_in("bias", bias);
    args.out = call.out("out", out);
    const auto desc = describe(args.x->dtype, n, k);
    args.desc = &desc;
    call.run(rk_linear, args);
  });
  m.def("embedding_packed", [](py::handle ids, py::handle packed, int64_t n, int64_t k, py::handle out) {
    Call call("embedding");
    rk_embedding_args args{sizeof args};
    args.ids = call.in("ids", ids);
    args.packed = call.in("weight", packed);
    args.out = call.out("out", out);
    const auto desc = describe(args.out->dtype, n, k);
    args.desc = &desc;
    call.run(rk_embedding, args);
  });
}

}  // namespace radix::bind
