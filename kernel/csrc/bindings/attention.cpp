#include "radix_kernels/attention.h"

#include "bindings/exchange.h"

namespace radix::bind {
namespace {

rk_attention_options options(float scale, bool causal, int left, int right, float softcap) {
  rk_attention_options o{};
  o.softmax_scale = scale;
  o.softcap = softcap;
  o.causal = causal;
  o.window_left = left;
  o.window_right = right;
  return o;
}

// What the two attention ops share.
template <class Args>
void read_shared(Call& call, Args& args, const rk_attention_options& options, py::handle q, py::handle cu_seqlens_q,
                 py::handle sinks, py::handle out, py::handle lse, py::handle k_scale, py::handle v_scale,
                 py::handle workspace, int64_t max_seqlen_q, py::handle q_scale) {
  args.options = options;
  args.q = call.in("q", q);
  args.cu_seqlens_q = call.in("cu_seqlens_q", cu_seqlens_q);
  args.sinks = call.optional_in("sinks", sinks);
  args.out = call.out("out", out);
  args.lse = call.optional_out("lse", lse);
  args.k_scale = call.optional_in("k_scale", k_scale);
  args.v_scale = call.optional_in("v_scale", v_scale);
  args.workspace = call.optional_out("workspace", workspace);
  args.max_seqlen_q = max_seqlen_q;
  args.q_scale = call.optional_in("q_scale", q_scale);
}

}  // namespace

void bind_attention(py::module_& m) {
  m.def("flash_attn_with_kvcache",
        [](py::handle q, py::handle k_cache, py::handle v_cache, py::handle page_table, py::handle kv_lens,
           py::handle cu_seqlens_q, float scale, bool causal, int left, int right, float softcap, py::handle sinks,
           py::handle out, py::handle lse, py::handle k_scale, py::handle v_scale, py::handle workspace,
           int64_t max_seqlen_q, py::handle q_scale, bool any_split) {
          Call call("flash_attn_with_kvcache");
          rk_flash_attn_with_kvcache_args args{sizeof args};
          read_shared(call, args, options(scale, causal, left, right, softcap), q, cu_seqlens_q, sinks, out, lse,
                      k_scale, v_scale, workspace, max_seqlen_q, q_scale);
          args.k_cache = call.in("k_cache", k_cache);
          args.v_cache = call.in("v_cache", v_cache);
          args.page_table = call.in("page_table", page_table);
          args.kv_lens = call.in("kv_lens", kv_lens);
          args.any_split = any_split;
          call.run(rk_flash_attn_with_kvcache, args);
        });
  m.def("flash_attn_varlen",
        [](py::handle q, py::handle k, py::handle v, py::handle cu_seqlens_q, py::handle cu_seqlens_k, float scale,
           bool causal, int left, int right, float softcap, py::handle sinks, py::handle out, py::handle lse,
           py::handle k_scale, py::handle v_scale, py::handle workspace, int64_t max_seqlen_q, py::handle q_scale) {
          Call call("flash_attn_varlen");
          rk_flash_attn_varlen_args args{sizeof args};
          read_shared(call, args, options(scale, causal, left, right, softcap), q, cu_seqlens_q, sinks, out, lse,
                      k_scale, v_scale, workspace, max_seqlen_q, q_scale);
          args.k = call.in("k", k);
          args.v = call.in("v", v);
          args.cu_seqlens_k = call.in("cu_seqlens_k", cu_seqlens_k);
          call.run(rk_flash_attn_varlen, args);
        });
  m.def("flash_attn_workspace_size", [](int64_t tokens, int64_t batch, int64_t heads, int64_t kv_heads,
                                        int64_t head_dim, int64_t page_size, int64_t max_pages, int64_t max_seqlen_q) {
    const rk_flash_attn_sizes sizes{sizeof sizes, tokens,    batch,     heads,       kv_heads,
                                    head_dim,     page_size, max_pages, max_seqlen_q};
    int64_t bytes = 0;
    if (const rk_status status = rk_flash_attn_workspace_size(&sizes, &bytes); status != RK_OK)
      raise(status, rk_last_error());
    return bytes;
  });
}

}  // namespace radix::bind
