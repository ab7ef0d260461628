#include "radix_kernels/rope.h"

#include "bindings/exchange.h"

namespace radix::bind {

void bind_rope(py::module_& m) {
  m.def("apply_rope_inplace", [](py::handle positions, py::handle query, py::handle key, int32_t head_size,
                                 py::handle cos_sin_cache, bool is_neox) {
    Call call("apply_rope_inplace");
    rk_apply_rope_inplace_args args{sizeof args};
    args.head_size = head_size;
    args.is_neox = is_neox;
    args.positions = call.in("positions", positions);
    args.query = call.out("query", query);
    args.key = call.optional_out("key", key);
    args.cos_sin_cache = call.in("cos_sin_cache", cos_sin_cache);
    call.run(rk_apply_rope_inplace, args);
  });
}

}  // namespace radix::bind
