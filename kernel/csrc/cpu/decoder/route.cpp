// The op of the routers.
#include "radix_kernels/moe.h"

#include "cpu/decoder/step.h"

namespace radix::cpu::decoder {

void run(const Step& step, const rk_route_op& op) {
  const View logits = step.view(op.logits), weights = step.view(op.weights), ids = step.view(op.ids);
  switch (op.router) {
    case RK_ROUTE_SOFTMAX:
      return call(rk_topk_softmax, rk_topk_softmax_args{sizeof(rk_topk_softmax_args), op.renormalize, logits, weights,
                                                        ids, op.groups, op.top_groups, 0, op.scaling});
    case RK_ROUTE_SIGMOID:
      return call(rk_topk_sigmoid,
                  rk_topk_sigmoid_args{sizeof(rk_topk_sigmoid_args), op.renormalize, logits, op.bias, weights, ids});
    case RK_ROUTE_GROUPED:
      return call(rk_moe_fused_gate, rk_moe_fused_gate_args{sizeof(rk_moe_fused_gate_args), op.groups, op.top_groups,
                                                            op.scaling, logits, op.bias, weights, ids, 0});
    default: fail(RK_INVALID, "decoder: router is %d, expected 0, 1 or 2", op.router);
  }
}

}  // namespace radix::cpu::decoder
