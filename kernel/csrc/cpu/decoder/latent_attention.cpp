// The op of latent attention in the absorbed form: rk_mla_decode between two products of the heads.
#include "cpu/decoder/step.h"
#include "radix_kernels/mla.h"

namespace radix::cpu::decoder {
namespace {

// Elements of a head.
struct Sizes {
  explicit Sizes(const rk_latent_attention_op& op) : cache("decoder", "kv_cache", op.kv_cache) {
    cache.dtype(kFloats).ndim(3);
    if (op.heads < 1 || !op.absorb || !op.absorb[0].desc || op.q.count % op.heads != 0 || op.out.count % op.heads != 0)
      fail(RK_INVALID, "decoder: %lld and %lld columns are not %lld heads with weights", (long long)op.q.count,
           (long long)op.out.count, (long long)op.heads);
    query = op.q.count / op.heads;
    value = op.out.count / op.heads;
    nope = op.absorb[0].desc->k;
    latent = op.absorb[0].desc->n;
    if (nope < 1 || latent < 1 || nope >= query || latent + query - nope != cache.size(2))
      fail(RK_INVALID, "decoder: heads of %lld elements, of which %lld become %lld, and a cache of %lld values",
           (long long)query, (long long)nope, (long long)latent, (long long)cache.size(2));
  }
  // Bytes of latent values of all heads.
  int64_t bytes(int64_t tokens, int64_t heads) const { return aligned(tokens * heads * latent * element_size(*cache)); }

  const Arg cache;
  int64_t query, value, nope, latent;
};

// [tokens, heads, latent] in scratch.
View latents(const Step& step, const rk_latent_attention_op& op, const Sizes& sizes, char* memory) {
  return View(*step.args.hidden, sizes.cache->dtype, memory, step.tokens(), op.heads * sizes.latent, op.heads,
              sizes.latent, sizes.latent);
}

void multiply(int32_t heads, const rk_packed_head* weights, const rk_tensor* x, const rk_tensor* out) {
  call(rk_linear_heads, rk_linear_heads_args{sizeof(rk_linear_heads_args), heads, weights, x, out});
}

int64_t attention_bytes(const rk_decoder_args& args, const rk_latent_attention_op& op, const Sizes& sizes) {
  const Absorbed part(args);
  rk_mla_decode_sizes of{sizeof of, part.tokens, part.entries, op.heads};
  of.page_size = sizes.cache.size(1);
  of.max_pages = args.page_table->shape[1];
  of.max_seqlen_q = args.max_seqlen_q;
  of.any_split = 1;
  of.kv_item_size = element_size(*sizes.cache);
  int64_t bytes = 0;
  const rk_status status = rk_mla_decode_workspace_size(&of, &bytes);
  if (status != RK_OK) fail(status, "%s", std::string(rk_last_error()).c_str());
  return bytes;
}

}  // namespace

void run(const Step& whole, const rk_latent_attention_op& op) {
  const Absorbed part(whole.args);
  if (part.tokens == 0) return;
  const Step step = whole.part(0, part.tokens);
  const Sizes sizes(op);
  const int64_t one = sizes.bytes(part.tokens, op.heads);
  const int64_t bytes = attention_bytes(step.args, op, sizes);
  const View q_latent = latents(step, op, sizes, step.scratch());
  const View seen = latents(step, op, sizes, step.scratch() + one);
  const View out = step.heads(op.out, op.heads, 0, sizes.value);
  const View q_nope = step.heads(op.q, op.heads, 0, sizes.nope);
  const View q_rope = step.heads(op.q, op.heads, sizes.nope, sizes.query - sizes.nope);
  multiply(op.heads, op.absorb, q_nope, q_latent);

  const Slice table(*step.args.page_table, 0, part.entries);
  const Slice lens(*step.args.kv_lens, 0, part.entries);
  const Slice offsets(*step.args.cu_seqlens_q, 0, part.entries + 1);
  const Vector space(*step.args.hidden, {RK_CODE_UINT, 8, 1}, step.scratch() + 2 * one, bytes);
  rk_mla_decode_args args{sizeof args, op.softmax_scale, /*causal=*/1};
  args.q_nope = q_latent;
  args.q_rope = q_rope;
  args.kv_cache = op.kv_cache;
  args.page_table = table;
  args.kv_lens = lens;
  args.cu_seqlens_q = offsets;
  args.out = seen;
  args.workspace = bytes > 0 ? static_cast<const rk_tensor*>(space) : nullptr;
  args.max_seqlen_q = step.args.max_seqlen_q;
  args.any_split = 1;
  call(rk_mla_decode, args);
  multiply(op.heads, op.values, seen, out);
}

int64_t scratch_bytes(const rk_decoder_args& args, const rk_latent_attention_op& op) {
  const Sizes sizes(op);
  return 2 * sizes.bytes(Absorbed(args).tokens, op.heads) + attention_bytes(args, op, sizes);
}

}  // namespace radix::cpu::decoder
