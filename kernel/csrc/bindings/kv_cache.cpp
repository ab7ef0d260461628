#include "radix_kernels/kv_cache.h"

#include "bindings/exchange.h"

namespace radix::bind {

void bind_kv_cache(py::module_& m) {
  m.def("store_kv_cache", [](py::handle k, py::handle v, py::handle k_cache, py::handle v_cache, py::handle slots) {
    Call call("store_kv_cache");
    rk_store_kv_cache_args args{sizeof args};
    args.k = call.in("k", k);
    args.v = call.in("v", v);
    args.k_cache = call.out("k_cache", k_cache);
    args.v_cache = call.out("v_cache", v_cache);
    args.slot_mapping = call.in("slot_mapping", slots);
    call.run(rk_store_kv_cache, args);
  });
}

}  // namespace radix::bind
