// The op of rk_fused_qk_norm_rope_store.
#include "radix_kernels/fused_rope.h"

#include "cpu/decoder/step.h"

namespace radix::cpu::decoder {

void run(const Step& step, const rk_rope_store_op& op) {
  const int64_t dim = head_dim(op.cache);
  const View q = step.view(op.q, dim), k = step.view(op.k, dim), v = step.view(op.v, dim);
  rk_fused_qk_norm_rope_store_args args{sizeof args, op.eps, op.is_neox};
  args.q = q;
  args.k = k;
  args.v = v;
  args.q_weight = op.q_norm;
  args.k_weight = op.k_norm;
  args.cos_sin_cache = op.cos_sin_cache;
  args.positions = step.args.positions;
  args.k_cache = op.cache.k;
  args.v_cache = op.cache.v;
  args.slot_mapping = step.args.slot_mapping;
  args.k_scale = op.cache.k_scale;
  args.v_scale = op.cache.v_scale;
  call(rk_fused_qk_norm_rope_store, args);
}

}  // namespace radix::cpu::decoder
