// Activation family on the CPU: rows are cut into blocks of columns, so that one long row uses every thread too.
#include "cpu/activation/activation.h"

#include "api/activation.h"
#include "cpu/thread_pool.h"

namespace radix::backend {
namespace {

constexpr int64_t kGrainElements = 8 * 1024;

void run(const rk_gated_activation_args& args, cpu::GatedKernel kernel) {
  const rk_tensor& out = *args.out;
  const int64_t width = out.shape[out.ndim - 1], blocks = (width + cpu::kGatedBlock - 1) / cpu::kGatedBlock;
  const cpu::GatedTask task{Rows(*args.input), Rows(out), width, blocks, dtype_of(out)};
  const int64_t unit = width < cpu::kGatedBlock ? width : cpu::kGatedBlock;
  cpu::parallel_for(task.out.count * blocks, 1 + kGrainElements / unit,
                    [&](int64_t begin, int64_t end) { kernel(task, begin, end); });
}

}  // namespace

void silu_and_mul(const rk_gated_activation_args& args, rk_stream) {
  run(args, cpu::activation_kernels().silu);
}

void gelu_and_mul(const rk_gated_activation_args& args, rk_stream) {
  run(args, cpu::activation_kernels().gelu);
}

void gelu_tanh_and_mul(const rk_gated_activation_args& args, rk_stream) {
  run(args, cpu::activation_kernels().gelu_tanh);
}

}  // namespace radix::backend
