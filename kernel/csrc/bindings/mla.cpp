#include "radix_kernels/mla.h"

#include "bindings/exchange.h"

namespace radix::bind {

void bind_mla(py::module_& m) {
  m.def("mla_decode", [](py::handle q_nope, py::handle q_rope, py::handle kv_cache, py::handle page_table,
                         py::handle kv_lens, py::handle cu_seqlens_q, float scale, bool causal, py::handle out,
                         py::handle lse, py::handle workspace, int64_t max_seqlen_q, bool any_split) {
    Call call("mla_decode");
    rk_mla_decode_args args{sizeof args};
    args.softmax_scale = scale;
    args.causal = causal;
    args.q_nope = call.in("q_nope", q_nope);
    args.q_rope = call.in("q_rope", q_rope);
    args.kv_cache = call.in("kv_cache", kv_cache);
    args.page_table = call.in("page_table", page_table);
    args.kv_lens = call.in("kv_lens", kv_lens);
    args.cu_seqlens_q = call.in("cu_seqlens_q", cu_seqlens_q);
    args.out = call.out("out", out);
    args.lse = call.optional_out("lse", lse);
    args.workspace = call.optional_out("workspace", workspace);
    args.max_seqlen_q = max_seqlen_q;
    args.any_split = any_split;
    call.run(rk_mla_decode, args);
  });
  m.def("mla_decode_workspace_size", [](int64_t tokens, int64_t batch, int64_t heads, int64_t page_size,
                                        int64_t max_pages, int64_t max_seqlen_q, bool any_split, int64_t kv_item_size) {
    const rk_mla_decode_sizes sizes{sizeof sizes, tokens,       batch,     heads,       page_size,
                                    max_pages,    max_seqlen_q, any_split, kv_item_size};
    int64_t bytes = 0;
    if (const rk_status status = rk_mla_decode_workspace_size(&sizes, &bytes); status != RK_OK)
      raise(status, rk_last_error());
    return bytes;
  });
}

}  // namespace radix::bind
