// The op of rk_fused_experts_packed.
#include "api/packed_experts.h"
#include "cpu/decoder/step.h"

namespace radix::cpu::decoder {

void run(const Step& step, const rk_experts_op& op) {
  const View x = step.view(op.x), weights = step.view(op.weights), ids = step.view(op.ids), out = step.view(op.out);
  const Vector space = step.scratch(scratch_bytes(step.args, op));
  rk_fused_experts_packed_args args{sizeof args, op.num_experts, op.experts};
  args.hidden_states = x;
  args.topk_weights = weights;
  args.topk_ids = ids;
  args.out = out;
  args.workspace = space;
  args.bias1 = op.bias1;
  args.bias2 = op.bias2;
  args.gating = op.gating;
  call(rk_fused_experts_packed, args);
}

int64_t scratch_bytes(const rk_decoder_args& args, const rk_experts_op& op) {
  if (op.num_experts < 1 || !op.experts || !op.experts[0].w2_desc) fail(RK_INVALID, "decoder: there are no experts");
  const rk_tensor& hidden = *args.hidden;
  return packed_experts_bytes(hidden.shape[0], op.ids.count, op.x.count, op.experts[0].w2_desc->k,
                              element_size(hidden));
}

}  // namespace radix::cpu::decoder
