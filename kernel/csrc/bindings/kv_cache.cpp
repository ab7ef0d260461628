#include "radix_kernels/kv_cache.h"

#include "bindings/exchange.h"
#include "common/dtype.h"

namespace radix::bind {

void bind_kv_cache(py::module_& m) {
  m.def("store_kv_cache", [](py::handle k, py::handle v, py::handle k_cache, py::handle v_cache, py::handle slots,
                             py::handle k_scale, py::handle v_scale) {
    Call call("store_kv_cache");
    rk_store_kv_cache_args args{sizeof args};
    args.k = call.in("k", k);
    args.v = call.in("v", v);
    args.k_cache = call.out("k_cache", k_cache);
    args.v_cache = call.out("v_cache", v_cache);
    args.slot_mapping = call.in("slot_mapping", slots);
    const auto scale = [&](const char* name, py::handle x) {  // those of INT8 are written
      return dtype_of(*args.k_cache) == DType::i8 ? call.optional_out(name, x) : call.optional_in(name, x);
    };
    args.k_scale = scale("k_scale", k_scale);
    args.v_scale = scale("v_scale", v_scale);
    call.run(rk_store_kv_cache, args);
  });
}

}  // namespace radix::bind
