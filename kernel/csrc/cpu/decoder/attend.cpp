// The op of rk_flash_attn_with_kvcache.
#include "radix_kernels/attention.h"

#include "cpu/decoder/step.h"

namespace radix::cpu::decoder {

void run(const Step& step, const rk_attention_op& op) {
  const int64_t dim = head_dim(op.cache), bytes = scratch_bytes(step.args, op);
  const View q = step.view(op.q, dim), out = step.view(op.out, dim);
  const Vector space = step.scratch(bytes);
  rk_flash_attn_with_kvcache_args args{sizeof args};
  args.options = {op.softmax_scale, op.softcap, /*causal=*/1, op.window_left, -1};
  args.sinks = op.sinks;
  args.q = q;
  args.k_cache = op.cache.k;
  args.v_cache = op.cache.v;
  args.page_table = step.args.page_table;
  args.kv_lens = step.args.kv_lens;
  args.cu_seqlens_q = step.args.cu_seqlens_q;
  args.k_scale = op.cache.k_scale;
  args.v_scale = op.cache.v_scale;
  args.out = out;
  args.workspace = bytes > 0 ? static_cast<const rk_tensor*>(space) : nullptr;
  args.max_seqlen_q = step.args.max_seqlen_q;
  call(rk_flash_attn_with_kvcache, args);
}

int64_t scratch_bytes(const rk_decoder_args& args, const rk_attention_op& op) {
  const int64_t dim = head_dim(op.cache);
  if (dim < 1) fail(RK_INVALID, "decoder: heads of the cache have no elements");
  const rk_tensor &table = *args.page_table, &k = *op.cache.k;
  const rk_flash_attn_sizes sizes{
      sizeof sizes, args.hidden->shape[0], table.shape[0],   op.q.count / dim, k.shape[2], dim,
      k.shape[1],   table.shape[1],        args.max_seqlen_q};
  int64_t bytes = 0;
  const rk_status status = rk_flash_attn_workspace_size(&sizes, &bytes);
  if (status != RK_OK) fail(status, "%s", std::string(rk_last_error()).c_str());
  return bytes;
}

}  // namespace radix::cpu::decoder
