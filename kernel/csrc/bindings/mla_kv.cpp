#include "radix_kernels/mla_kv.h"

#include "bindings/exchange.h"

namespace radix::bind {

void bind_mla_kv(py::module_& m) {
  m.def("store_mla_kv", [](py::handle latent, py::handle rope, py::handle kv_cache, py::handle slot_mapping) {
    Call call("store_mla_kv");
    rk_store_mla_kv_args args{sizeof args};
    args.latent = call.in("latent", latent);
    args.rope = call.in("rope", rope);
    args.kv_cache = call.out("kv_cache", kv_cache);
    args.slot_mapping = call.in("slot_mapping", slot_mapping);
    call.run(rk_store_mla_kv, args);
  });
  m.def("gather_mla_kv",
        [](py::handle kv_cache, py::handle page_table, py::handle cu_seqlens, py::handle starts, py::handle out) {
          Call call("gather_mla_kv");
          rk_gather_mla_kv_args args{sizeof args};
          args.kv_cache = call.in("kv_cache", kv_cache);
          args.page_table = call.in("page_table", page_table);
          args.cu_seqlens = call.in("cu_seqlens", cu_seqlens);
          args.starts = call.optional_in("starts", starts);
          args.out = call.out("out", out);
          call.run(rk_gather_mla_kv, args);
        });
  m.def("concat_mla_k", [](py::handle k, py::handle k_nope, py::handle k_rope) {
    Call call("concat_mla_k");
    rk_concat_mla_k_args args{sizeof args};
    args.k = call.out("k", k);
    args.k_nope = call.in("k_nope", k_nope);
    args.k_rope = call.in("k_rope", k_rope);
    call.run(rk_concat_mla_k, args);
  });
}

}  // namespace radix::bind
