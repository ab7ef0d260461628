// merge_state: checks once for every backend, then the backend's kernel. A family of its own, for GPUs without the rest
// of attention have it too.
#include "api/merge_state.h"

#include "common/tensor.h"

using namespace radix;

rk_status rk_merge_state(const rk_merge_state_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "merge_state";
    const auto a = read_args(op, args);
    const Arg out_a(op, "out_a", a.out_a), lse_a(op, "lse_a", a.lse_a), out_b(op, "out_b", a.out_b),
        lse_b(op, "lse_b", a.lse_b), out(op, "out", a.out), lse(op, "lse", a.lse);
    out_a.backend_device().dtype(kFloats).ndim(3).last_contiguous();
    out_b.same_device(out_a).same_dtype(out_a).same_shape(out_a).last_contiguous();
    out.same_device(out_a).same_dtype(out_a).same_shape(out_a).last_contiguous().writable();
    for (const Arg* l : {&lse_a, &lse_b, &lse})
      l->same_device(out_a).dtype({DType::f32}).shape({out_a.size(0), out_a.size(1)}, "tokens and heads of out_a");
    lse.writable();
    if (out_a.numel() > 0) backend::merge_state(a, stream);
  });
}
