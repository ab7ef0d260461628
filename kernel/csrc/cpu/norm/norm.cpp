// Norm family on the CPU: views from checked arguments, rows split over the pool.
#include "cpu/norm/norm.h"

#include "api/norm.h"
#include "cpu/thread_pool.h"

namespace radix::backend {
namespace {
constexpr int64_t kGrainElements = 16 * 1024;
}

void rmsnorm(const rk_rmsnorm_args& args, rk_stream) {
  const rk_tensor& in = *args.input;
  const cpu::RmsnormTask task{Rows(in),
                              Rows(*args.out),
                              data_ptr<void>(*args.weight),
                              in.shape[in.ndim - 1],
                              dtype_of(in),
                              dtype_of(*args.weight),
                              args.eps};
  const auto kernel = cpu::norm_kernels().rmsnorm;
  cpu::parallel_for(task.input.count, 1 + kGrainElements / task.hidden,
                    [&](int64_t begin, int64_t end) { kernel(task, begin, end); });
}

void fused_add_rmsnorm(const rk_fused_add_rmsnorm_args& args, rk_stream) {
  const rk_tensor& in = *args.input;
  const cpu::FusedAddRmsnormTask task{Rows(in),
                                      Rows(*args.residual),
                                      data_ptr<void>(*args.weight),
                                      in.shape[in.ndim - 1],
                                      dtype_of(in),
                                      dtype_of(*args.weight),
                                      args.eps};
  const auto kernel = cpu::norm_kernels().fused_add_rmsnorm;
  cpu::parallel_for(task.input.count, 1 + kGrainElements / task.hidden,
                    [&](int64_t begin, int64_t end) { kernel(task, begin, end); });
}

}  // namespace radix::backend
