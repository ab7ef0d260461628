// Layer normalisation: checks, then the backend's kernel.
#include "api/layernorm.h"

#include "common/check.h"

using namespace radix;

rk_status rk_layernorm(const rk_layernorm_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "layernorm";
    const auto a = read_args(op, args);
    const Arg input(op, "input", a.input), out(op, "out", a.out);
    input.backend_device().dtype(kFloats).min_ndim(1).last_contiguous();
    const auto check_row = [&](const char* name, const rk_tensor* tensor) {
      if (!tensor) return;
      const Arg row(op, name, tensor);
      row.same_device(input).shape({input.size(-1)}, "last dimension of input").last_contiguous();
      row.dtype({input.type(), DType::f32});
    };
    check_row("weight", a.weight);
    check_row("bias", a.bias);
    out.same_device(input).same_dtype(input).same_shape(input).last_contiguous().writable();
    if (input.numel() > 0) backend::layernorm(a, stream);
  });
}
