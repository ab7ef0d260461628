// The op that stores latent tokens: rk_apply_rope_inplace and rk_store_mla_kv.
#include <algorithm>

#include "cpu/decoder/step.h"
#include "radix_kernels/mla_kv.h"
#include "radix_kernels/rope.h"

namespace radix::cpu::decoder {

void run(const Step& step, const rk_latent_store_op& op) {
  const int64_t rotary = op.rope.count;
  const int64_t first = op.q.count / std::max(op.heads, 1) - rotary;
  const View q = step.heads(op.q, op.heads, first, rotary);
  const View latent = step.view(op.latent);
  const View rope = step.view(op.rope);
  rk_apply_rope_inplace_args turn{sizeof turn, static_cast<int32_t>(rotary), op.is_neox};
  turn.positions = step.args.positions;
  turn.query = q;
  turn.key = rope;
  turn.cos_sin_cache = op.cos_sin_cache;
  call(rk_apply_rope_inplace, turn);
  call(rk_store_mla_kv,
       rk_store_mla_kv_args{sizeof(rk_store_mla_kv_args), latent, rope, op.kv_cache, step.args.slot_mapping});
}

}  // namespace radix::cpu::decoder
