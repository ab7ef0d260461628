// The ops of latent attention: rk_apply_rope_inplace and rk_store_mla_kv; rk_mla_decode.
#include "radix_kernels/mla.h"
#include "radix_kernels/mla_kv.h"
#include "radix_kernels/rope.h"

#include "cpu/decoder/step.h"

namespace radix::cpu::decoder {

void run(const Step& step, const rk_latent_store_op& op) {
  const int64_t rotary = op.rope.count;
  const View q = step.heads(op.q, op.heads, rotary), latent = step.view(op.latent), rope = step.view(op.rope);
  rk_apply_rope_inplace_args turn{sizeof turn, static_cast<int32_t>(rotary), op.is_neox};
  turn.positions = step.args.positions;
  turn.query = q;
  turn.key = rope;
  turn.cos_sin_cache = op.cos_sin_cache;
  call(rk_apply_rope_inplace, turn);
  call(rk_store_mla_kv,
       rk_store_mla_kv_args{sizeof(rk_store_mla_kv_args), latent, rope, op.kv_cache, step.args.slot_mapping});
}

namespace {

const Arg cache_of(const rk_latent_attention_op& op) {
  const Arg cache("decoder", "kv_cache", op.kv_cache);
  cache.dtype(kFloats).ndim(3);
  if (op.heads < 1 || op.q_latent.count % op.heads != 0 || op.q_latent.count / op.heads >= cache.size(2))
    fail(RK_INVALID, "decoder: %lld columns are not %lld heads of a cache of %lld values", (long long)op.q_latent.count,
         (long long)op.heads, (long long)cache.size(2));
  return cache;
}

}  // namespace

void run(const Step& step, const rk_latent_attention_op& op) {
  const int64_t rotary = cache_of(op).size(2) - op.q_latent.count / op.heads, bytes = scratch_bytes(step.args, op);
  const View q_latent = step.heads(op.q_latent, op.heads), q_rope = step.heads(op.q, op.heads, rotary),
             out = step.heads(op.out, op.heads);
  const Bytes space = step.scratch(bytes);
  rk_mla_decode_args args{sizeof args, op.softmax_scale, /*causal=*/1};
  args.q_nope = q_latent;
  args.q_rope = q_rope;
  args.kv_cache = op.kv_cache;
  args.page_table = step.args.page_table;
  args.kv_lens = step.args.kv_lens;
  args.cu_seqlens_q = step.args.cu_seqlens_q;
  args.out = out;
  args.workspace = bytes > 0 ? static_cast<const rk_tensor*>(space) : nullptr;
  args.max_seqlen_q = step.args.max_seqlen_q;
  args.any_split = 1;
  call(rk_mla_decode, args);
}

int64_t scratch_bytes(const rk_decoder_args& args, const rk_latent_attention_op& op) {
  const Arg cache = cache_of(op);
  const rk_tensor& table = *args.page_table;
  const rk_mla_decode_sizes sizes{sizeof sizes,      args.hidden->shape[0], table.shape[0],
                                  op.heads,          cache.size(1),         table.shape[1],
                                  args.max_seqlen_q, /*any_split=*/1,       element_size(*cache)};
  int64_t bytes = 0;
  const rk_status status = rk_mla_decode_workspace_size(&sizes, &bytes);
  if (status != RK_OK) fail(status, "%s", std::string(rk_last_error()).c_str());
  return bytes;
}

}  // namespace radix::cpu::decoder
