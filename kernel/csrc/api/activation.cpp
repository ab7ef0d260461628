// Activation family: checks once for every backend, then the backend's kernel.
#include "api/activation.h"

#include "common/check.h"

using namespace radix;

namespace {

using Kernel = void (*)(const rk_gated_activation_args&, rk_stream);

rk_status run(const char* op, const rk_gated_activation_args* args, rk_stream stream, Kernel kernel) {
  return guard([&] {
    const auto a = read_args(op, args);
    const Arg input(op, "input", a.input), out(op, "out", a.out);
    input.backend_device().dtype(kFloats).min_ndim(1).last_contiguous();
    if (input.size(-1) % 2 != 0)
      input.reject(RK_INVALID, "has shape %s, expected an even last dimension (gate and up)",
                   shape_text(*input).c_str());
    out.same_device(input).same_dtype(input).last_contiguous().writable();
    bool same = out->ndim == input->ndim && out.size(-1) == input.size(-1) / 2;
    for (int i = 0; same && i < out->ndim - 1; i++) same = out.size(i) == input.size(i);
    if (!same)
      out.reject(RK_INVALID, "has shape %s, expected input's shape %s with half its last dimension",
                 shape_text(*out).c_str(), shape_text(*input).c_str());
    if (out.numel() > 0) kernel(a, stream);
  });
}

}  // namespace

rk_status rk_silu_and_mul(const rk_gated_activation_args* args, rk_stream stream) {
  return run("silu_and_mul", args, stream, backend::silu_and_mul);
}

rk_status rk_gelu_and_mul(const rk_gated_activation_args* args, rk_stream stream) {
  return run("gelu_and_mul", args, stream, backend::gelu_and_mul);
}

rk_status rk_gelu_tanh_and_mul(const rk_gated_activation_args* args, rk_stream stream) {
  return run("gelu_tanh_and_mul", args, stream, backend::gelu_tanh_and_mul);
}
