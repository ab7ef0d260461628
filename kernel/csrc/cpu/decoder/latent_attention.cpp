// The op of latent attention in the absorbed form: rk_mla_decode between two products of each head.
#include <deque>

#include "cpu/decoder/step.h"
#include "cpu/linear/products.h"
#include "radix_kernels/mla.h"

namespace radix::cpu::decoder {
namespace {

// Elements of a head.
struct Sizes {
  explicit Sizes(const rk_latent_attention_op& op) : cache("decoder", "kv_cache", op.kv_cache) {
    cache.dtype(kFloats).ndim(3);
    if (op.heads < 1 || !op.weights || !op.weights[0].absorb_desc || op.q.count % op.heads != 0 ||
        op.out.count % op.heads != 0)
      fail(RK_INVALID, "decoder: %lld and %lld columns are not %lld heads with weights", (long long)op.q.count,
           (long long)op.out.count, (long long)op.heads);
    query = op.q.count / op.heads;
    value = op.out.count / op.heads;
    nope = op.weights[0].absorb_desc->k;
    latent = op.weights[0].absorb_desc->n;
    if (nope < 1 || latent < 1 || nope >= query || latent + query - nope != cache.size(2))
      fail(RK_INVALID, "decoder: heads of %lld elements, of which %lld become %lld, and a cache of %lld values",
           (long long)query, (long long)nope, (long long)latent, (long long)cache.size(2));
  }
  // Bytes of latent values of all heads.
  int64_t bytes(int64_t tokens, int64_t heads) const {
    return aligned(tokens * heads * latent * element_size(*cache));
  }

  const Arg cache;
  int64_t query, value, nope, latent;
};

// Latent values of all heads, [tokens, heads, latent] in scratch.
struct Latents {
  const Step& step;
  char* memory;
  rk_dtype dtype;
  int64_t heads, latent;

  View all() const {
    return View(*step.args.hidden, dtype, memory, step.tokens(), heads * latent, heads, latent, latent);
  }
  View head(int64_t number) const {
    char* const from = memory + number * latent * (dtype.bits / 8);
    return View(*step.args.hidden, dtype, from, step.tokens(), heads * latent, latent);
  }
};

// The first `count` columns of a head.
rk_columns head_of(const rk_columns& all, int64_t heads, int64_t number, int64_t count) {
  return {all.buffer, all.first + all.count / heads * number, count};
}

// What a product of one head reads and writes.
struct Head {
  Head(const Step& step, const rk_columns& all, int64_t count, const Latents& of, int64_t number)
      : columns(step.view(head_of(all, of.heads, number, count))), latents(of.head(number)) {}
  const View columns, latents;
};

void add_product(Products& products, const rk_packed_desc* desc, const rk_tensor* packed, const View& x,
                 const View& out) {
  rk_linear_args args{sizeof args, desc};
  args.x = x;
  args.packed = packed;
  args.out = out;
  products.add(args);
}

// Queries without positions -> latent values.
void absorb(const Step& step, const rk_latent_attention_op& op, int64_t nope, const Latents& out) {
  std::deque<Head> heads;
  Products products(op.heads);
  for (int64_t h = 0; h < op.heads; h++) {
    const Head& head = heads.emplace_back(step, op.q, nope, out, h);
    add_product(products, op.weights[h].absorb_desc, op.weights[h].absorb, head.columns, head.latents);
  }
  products.run();
}

// Latent values that were attended to -> those of the heads.
void unfold(const Step& step, const rk_latent_attention_op& op, int64_t value, const Latents& x) {
  std::deque<Head> heads;
  Products products(op.heads);
  for (int64_t h = 0; h < op.heads; h++) {
    const Head& head = heads.emplace_back(step, op.out, value, x, h);
    add_product(products, op.weights[h].values_desc, op.weights[h].values, head.latents, head.columns);
  }
  products.run();
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
  const int64_t one = sizes.bytes(part.tokens, op.heads), bytes = attention_bytes(step.args, op, sizes);
  const Latents queries{step, step.scratch(), sizes.cache->dtype, op.heads, sizes.latent};
  const Latents seen{step, step.scratch() + one, sizes.cache->dtype, op.heads, sizes.latent};
  absorb(step, op, sizes.nope, queries);

  const View q_nope = queries.all(), q_rope = step.heads(op.q, op.heads, sizes.query - sizes.nope), out = seen.all();
  const Slice table(*step.args.page_table, 0, part.entries), lens(*step.args.kv_lens, 0, part.entries),
      offsets(*step.args.cu_seqlens_q, 0, part.entries + 1);
  const Vector space(*step.args.hidden, {RK_CODE_UINT, 8, 1}, step.scratch() + 2 * one, bytes);
  rk_mla_decode_args args{sizeof args, op.softmax_scale, /*causal=*/1};
  args.q_nope = q_nope;
  args.q_rope = q_rope;
  args.kv_cache = op.kv_cache;
  args.page_table = table;
  args.kv_lens = lens;
  args.cu_seqlens_q = offsets;
  args.out = out;
  args.workspace = bytes > 0 ? static_cast<const rk_tensor*>(space) : nullptr;
  args.max_seqlen_q = step.args.max_seqlen_q;
  args.any_split = 1;
  call(rk_mla_decode, args);
  unfold(step, op, sizes.value, seen);
}

int64_t scratch_bytes(const rk_decoder_args& args, const rk_latent_attention_op& op) {
  const Sizes sizes(op);
  return 2 * sizes.bytes(Absorbed(args).tokens, op.heads) + attention_bytes(args, op, sizes);
}

}  // namespace radix::cpu::decoder
