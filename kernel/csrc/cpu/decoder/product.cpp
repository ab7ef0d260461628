// The op of rk_linear.
#include "cpu/decoder/step.h"

namespace radix::cpu::decoder {

void run(const Step& step, const rk_linear_op& op) {
  const bool adds = op.residual.count > 0;
  const View x = step.view(op.x), out = step.view(op.out), residual = step.view(adds ? op.residual : op.out);
  rk_linear_args args{sizeof args, op.desc};
  args.x = x;
  args.packed = op.packed;
  args.bias = op.bias;
  args.out = out;
  args.residual = adds ? static_cast<const rk_tensor*>(residual) : nullptr;
  args.gate = op.gate;
  call(rk_linear, args);
}

}  // namespace radix::cpu::decoder
