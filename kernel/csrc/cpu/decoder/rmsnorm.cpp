// The op of rk_rmsnorm.
#include "radix_kernels/norm.h"

#include "cpu/decoder/step.h"

namespace radix::cpu::decoder {

void run(const Step& step, const rk_rmsnorm_op& op) {
  const View x = step.view(op.x), out = step.view(op.out);
  call(rk_rmsnorm, rk_rmsnorm_args{sizeof(rk_rmsnorm_args), op.eps, x, op.weight, out});
}

}  // namespace radix::cpu::decoder
