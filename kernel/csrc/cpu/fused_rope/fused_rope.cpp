// Fused rope family on the CPU: positions and slots checked, tokens split over the pool.
#include "cpu/fused_rope/fused_rope.h"

#include "api/fused_rope.h"
#include "cpu/thread_pool.h"

namespace radix::backend {
namespace {

constexpr int64_t kGrainElements = 16 * 1024;

cpu::TokenHeads heads_of(const rk_tensor& t) {
  const int64_t item = element_size(t);
  return {data_ptr<char>(t), t.strides[0] * item, t.strides[1] * item};
}

cpu::CacheHeads slots_of(const rk_tensor& t) {
  const int64_t item = element_size(t);
  return {data_ptr<char>(t), t.strides[0] * item, t.strides[1] * item, t.strides[2] * item};
}

cpu::CacheHeads scales_of(const rk_tensor* t) {
  return t ? slots_of(*t) : cpu::CacheHeads{};
}

void check_range(const char* name, const Indices& indices, int64_t low, int64_t limit) {
  for (int64_t t = 0; t < indices.count(); t++)
    if (indices[t] < low || indices[t] >= limit)
      fail(RK_INVALID, "fused_qk_norm_rope_store: %s[%ld] is %ld, expected %ld to %ld", name, t, indices[t], low,
           limit - 1);
}

}  // namespace

void fused_qk_norm_rope_store(const rk_fused_qk_norm_rope_store_args& args, rk_stream) {
  const rk_tensor &q = *args.q, &table = *args.cos_sin_cache;
  const cpu::FusedRopeTask task{Indices(*args.positions),
                                Indices(*args.slot_mapping),
                                heads_of(q),
                                heads_of(*args.k),
                                heads_of(*args.v),
                                slots_of(*args.k_cache),
                                slots_of(*args.v_cache),
                                scales_of(args.k_scale),
                                scales_of(args.v_scale),
                                args.q_weight ? data_ptr<void>(*args.q_weight) : nullptr,
                                args.k_weight ? data_ptr<void>(*args.k_weight) : nullptr,
                                data_ptr<float>(table),
                                table.strides[0],
                                table.shape[1],
                                q.shape[2],
                                q.shape[1],
                                args.k->shape[1],
                                args.k_cache->shape[1],
                                dtype_of(q),
                                args.q_weight ? dtype_of(*args.q_weight) : DType::f32,
                                args.eps,
                                args.is_neox != 0};
  check_range("positions", task.positions, 0, table.shape[0]);
  check_range("slot_mapping", task.slots, -1, args.k_cache->shape[0] * task.page_size);
  const int64_t work = (task.q_heads + 2 * task.kv_heads) * task.dim;
  const auto kernel = cpu::fused_rope_kernels().run;
  cpu::parallel_for(q.shape[0], 1 + kGrainElements / (1 + work),
                    [&](int64_t begin, int64_t end) { kernel(task, begin, end); });
}

}  // namespace radix::backend
