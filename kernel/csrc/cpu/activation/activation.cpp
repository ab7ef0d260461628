// Activation family on the CPU: rows are cut into blocks of columns, so that one long row uses every thread too.
#include "cpu/activation/activation.h"

#include "api/activation.h"
#include "cpu/thread_pool.h"

namespace radix {

void cpu::run_gated(const rk_gated_activation_args& args, const rk_gating& gating) {
  constexpr int64_t kGrainElements = 8 * 1024;
  const rk_tensor& out = *args.out;
  const int64_t width = out.shape[out.ndim - 1], blocks = (width + kGatedBlock - 1) / kGatedBlock;
  const GatedTask task{Rows(*args.input), Rows(out), width, blocks, dtype_of(out), gating};
  const int64_t unit = width < kGatedBlock ? width : kGatedBlock;
  const auto kernel = activation_kernels().gated;
  parallel_for(task.out.count * blocks, 1 + kGrainElements / unit,
               [&](int64_t begin, int64_t end) { kernel(task, begin, end); });
}

namespace backend {

void silu_and_mul(const rk_gated_activation_args& args, rk_stream) {
  cpu::run_gated(args, {RK_ACTIVATION_SILU});
}

void gelu_and_mul(const rk_gated_activation_args& args, rk_stream) {
  cpu::run_gated(args, {RK_ACTIVATION_GELU});
}

void gelu_tanh_and_mul(const rk_gated_activation_args& args, rk_stream) {
  cpu::run_gated(args, {RK_ACTIVATION_GELU_TANH});
}

}  // namespace backend
}  // namespace radix
