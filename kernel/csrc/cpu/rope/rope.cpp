// Rope family on the CPU: positions checked, tokens split over the pool.
#include "cpu/rope/rope.h"

#include "api/rope.h"
#include "cpu/thread_pool.h"

namespace radix::backend {
namespace {

constexpr int64_t kGrainElements = 16 * 1024;

cpu::RopeHeads heads_of(const rk_tensor* t, int64_t head_size) {
  if (!t) return {};
  const int64_t item = element_size(*t);
  if (t->ndim == 3) return {data_ptr<char>(*t), t->shape[1], t->strides[0] * item, t->strides[1] * item};
  return {data_ptr<char>(*t), t->shape[1] / head_size, t->strides[0] * item, head_size * item};
}

void check_positions(const Indices& positions, int64_t max_position) {
  for (int64_t t = 0; t < positions.count(); t++)
    if (positions[t] < 0 || positions[t] >= max_position)
      fail(RK_INVALID, "apply_rope_inplace: positions[%ld] is %ld, expected 0 to %ld (rows of cos_sin_cache)", t,
           positions[t], max_position - 1);
}

}  // namespace

void apply_rope_inplace(const rk_apply_rope_inplace_args& args, rk_stream) {
  const rk_tensor& cache = *args.cos_sin_cache;
  const cpu::RopeTask task{Indices(*args.positions),
                           data_ptr<float>(cache),
                           cache.strides[0],
                           cache.shape[1],
                           dtype_of(*args.query),
                           args.is_neox != 0,
                           heads_of(args.query, args.head_size),
                           heads_of(args.key, args.head_size)};
  check_positions(task.positions, cache.shape[0]);
  const int64_t work = (task.query.heads + task.key.heads) * task.rotary_dim;
  if (work == 0) return;
  const auto kernel = cpu::rope_kernels().rotate;
  cpu::parallel_for(task.positions.count(), 1 + kGrainElements / work,
                    [&](int64_t begin, int64_t end) { kernel(task, begin, end); });
}

}  // namespace radix::backend
