// Products of heads: checks of what they share. Each product is checked as rk_linear checks its own.
#include "api/packed_heads.h"

#include "common/tensor.h"

using namespace radix;

rk_status rk_linear_heads(const rk_linear_heads_args* args, rk_stream) {
  return guard([&] {
    const char* op = "linear_heads";
    const auto a = read_args(op, args);
    const Arg x(op, "x", a.x);
    const Arg out(op, "out", a.out);
    x.backend_device().dtype(kFloats).ndim(3).last_contiguous();
    if (x->device.type != RK_DEVICE_CPU) x.reject(RK_UNSUPPORTED, "is on a GPU, this op runs on the CPU");
    if (a.num_heads < 1 || !a.heads || !a.heads[0].desc) fail(RK_INVALID, "%s: there are no heads", op);
    const int64_t outputs = a.heads[0].desc->n;
    const int64_t inputs = a.heads[0].desc->k;
    x.shape({-1, a.num_heads, inputs}, "heads, inputs of their weights");
    out.same_device(x).shape({x.size(0), a.num_heads, outputs}, "tokens and heads of x, outputs of their weights");
    out.last_contiguous().writable();
    for (int32_t h = 0; h < a.num_heads; h++) {
      const rk_packed_head& head = a.heads[h];
      if (!head.desc || !head.packed) fail(RK_INVALID, "%s: the weight of head %d is missing", op, h);
      if (head.desc->n != outputs || head.desc->k != inputs)
        fail(RK_INVALID, "%s: the weight of head %d is [%lld, %lld], expected [%lld, %lld], as head 0", op, h,
             (long long)head.desc->n, (long long)head.desc->k, (long long)outputs, (long long)inputs);
    }
    if (out.numel() > 0) backend::linear_heads(a);
  });
}
