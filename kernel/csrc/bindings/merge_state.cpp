#include "bindings/exchange.h"
#include "radix_kernels/attention.h"

namespace radix::bind {

void bind_merge_state(py::module_& m) {
  m.def("merge_state",
        [](py::handle out_a, py::handle lse_a, py::handle out_b, py::handle lse_b, py::handle out, py::handle lse) {
          Call call("merge_state");
          rk_merge_state_args args{sizeof args};
          args.out_a = call.in("out_a", out_a);
          args.lse_a = call.in("lse_a", lse_a);
          args.out_b = call.in("out_b", out_b);
          args.lse_b = call.in("lse_b", lse_b);
          args.out = call.out("out", out);
          args.lse = call.out("lse", lse);
          call.run(rk_merge_state, args);
        });
}

}  // namespace radix::bind
