#include "radix_kernels/fused_rope.h"

#include "bindings/exchange.h"

namespace radix::bind {

void bind_fused_rope(py::module_& m) {
  m.def("fused_qk_norm_rope_store",
        [](py::handle q, py::handle k, py::handle v, py::handle q_weight, py::handle k_weight, py::handle cos_sin_cache,
           py::handle positions, py::handle k_cache, py::handle v_cache, py::handle slot_mapping, float eps,
           bool is_neox, py::handle k_scale, py::handle v_scale) {
          Call call("fused_qk_norm_rope_store");
          rk_fused_qk_norm_rope_store_args args{sizeof args};
          args.eps = eps;
          args.is_neox = is_neox;
          args.q = call.out("q", q);
          args.k = call.in("k", k);
          args.v = call.in("v", v);
          args.q_weight = call.optional_in("q_weight", q_weight);
          args.k_weight = call.optional_in("k_weight", k_weight);
          args.cos_sin_cache = call.in("cos_sin_cache", cos_sin_cache);
          args.positions = call.in("positions", positions);
          args.k_cache = call.out("k_cache", k_cache);
          args.v_cache = call.out("v_cache", v_cache);
          args.slot_mapping = call.in("slot_mapping", slot_mapping);
          args.k_scale = call.optional_out("k_scale", k_scale);
          args.v_scale = call.optional_out("v_scale", v_scale);
          call.run(rk_fused_qk_norm_rope_store, args);
        });
}

}  // namespace radix::bind
