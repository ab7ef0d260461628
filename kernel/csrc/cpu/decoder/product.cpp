// The op of rk_linear.
#include "cpu/decoder/step.h"
#include "cpu/linear/kernels.h"

namespace radix::cpu::decoder {
namespace {

void multiply(const Step& step, const rk_linear_op& op, bool keep_x) {
  const bool adds = op.residual.count > 0;
  const View x = step.view(op.x), out = step.view(op.out), residual = step.view(adds ? op.residual : op.out);
  rk_linear_args args{sizeof args, op.desc};
  args.x = x;
  args.packed = op.packed;
  args.bias = op.bias;
  args.out = out;
  args.residual = adds ? static_cast<const rk_tensor*>(residual) : nullptr;
  args.gate = op.gate;
  args.keep_x = keep_x;
  call(rk_linear, args);
}

}  // namespace

// Prompts apart where that gives them other bits, so that a token's depend on no other one.
void run(const Step& step, const rk_linear_op& op) {
  const View x = step.view(op.x);
  const bool apart = op.desc && linear_kernels().keeps_x(*op.desc, dtype_of(*static_cast<const rk_tensor*>(x)));
  const int64_t decoded = apart ? Absorbed(step.args).tokens : step.tokens();
  if (decoded > 0) multiply(step.part(0, decoded), op, false);
  if (decoded < step.tokens()) multiply(step.part(decoded, step.tokens() - decoded), op, true);
}

}  // namespace radix::cpu::decoder
