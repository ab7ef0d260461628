// The op of the gated activations.
#include "radix_kernels/activation.h"

#include "cpu/decoder/step.h"

namespace radix::cpu::decoder {

void run(const Step& step, const rk_gated_activation_op& op) {
  const View x = step.view(op.x), out = step.view(op.out);
  const rk_gated_activation_args args{sizeof args, x, out};
  switch (op.activation) {
    case RK_ACTIVATION_SILU: return call(rk_silu_and_mul, args);
    case RK_ACTIVATION_GELU: return call(rk_gelu_and_mul, args);
    case RK_ACTIVATION_GELU_TANH: return call(rk_gelu_tanh_and_mul, args);
    default: fail(RK_INVALID, "decoder: activation is %d, expected 0, 1 or 2", op.activation);
  }
}

}  // namespace radix::cpu::decoder
