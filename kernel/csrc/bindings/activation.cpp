#include "radix_kernels/activation.h"

#include "bindings/exchange.h"

namespace radix::bind {

using Entry = rk_status (*)(const rk_gated_activation_args*, rk_stream);

static void define(py::module_& m, const char* op, Entry entry) {
  m.def(op, [op, entry](py::handle input, py::handle out) {
    Call call(op);
    rk_gated_activation_args args{sizeof args};
    args.input = call.in("input", input);
    args.out = call.out("out", out);
    call.run(entry, args);
  });
}

void bind_activation(py::module_& m) {
  define(m, "silu_and_mul", rk_silu_and_mul);
  define(m, "gelu_and_mul", rk_gelu_and_mul);
  define(m, "gelu_tanh_and_mul", rk_gelu_tanh_and_mul);
}

}  // namespace radix::bind
