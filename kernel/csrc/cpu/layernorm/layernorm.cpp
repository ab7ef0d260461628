// Layernorm on the CPU: views from checked arguments, rows split over the pool.
#include "cpu/layernorm/layernorm.h"

#include "api/layernorm.h"
#include "cpu/thread_pool.h"

namespace radix::backend {

void layernorm(const rk_layernorm_args& args, rk_stream) {
  constexpr int64_t kGrainElements = 16 * 1024;
  const rk_tensor& in = *args.input;
  const auto row = [](const rk_tensor* t) {
    return t ? cpu::RowTensor{data_ptr<void>(*t), dtype_of(*t)} : cpu::RowTensor{};
  };
  const cpu::LayernormTask task{Rows(in),     Rows(*args.out), row(args.weight), row(args.bias), in.shape[in.ndim - 1],
                                dtype_of(in), args.eps};
  const auto kernel = cpu::layernorm_kernels().rows;
  cpu::parallel_for(task.input.count, 1 + kGrainElements / task.hidden,
                    [&](int64_t begin, int64_t end) noexcept { kernel(task, begin, end); });
}

}  // namespace radix::backend
