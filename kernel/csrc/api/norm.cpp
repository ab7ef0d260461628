// Norm family: checks once for every backend, then the backend's kernel.
#include "api/norm.h"

#include "common/check.h"

using namespace radix;

namespace {

void check_weight(const Arg& weight, const Arg& input) {
  weight.same_device(input).shape({input.size(-1)}, "last dimension of input").last_contiguous();
  weight.dtype({input.type(), DType::f32});
}

}  // namespace

rk_status rk_rmsnorm(const rk_rmsnorm_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "rmsnorm";
    const auto a = read_args(op, args);
    const Arg input(op, "input", a.input), weight(op, "weight", a.weight), out(op, "out", a.out);
    input.backend_device().dtype(kFloats).min_ndim(1).last_contiguous();
    check_weight(weight, input);
    out.same_device(input).same_dtype(input).same_shape(input).last_contiguous().writable();
    if (input.numel() > 0) backend::rmsnorm(a, stream);
  });
}

rk_status rk_fused_add_rmsnorm(const rk_fused_add_rmsnorm_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "fused_add_rmsnorm";
    const auto a = read_args(op, args);
    const Arg input(op, "input", a.input), residual(op, "residual", a.residual), weight(op, "weight", a.weight);
    input.backend_device().dtype(kFloats).min_ndim(1).last_contiguous().writable();
    residual.same_device(input).same_dtype(input).same_shape(input).last_contiguous().writable();
    check_weight(weight, input);
    if (input.numel() > 0) backend::fused_add_rmsnorm(a, stream);
  });
}
