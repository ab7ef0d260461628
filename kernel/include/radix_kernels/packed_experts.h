/* A mixture of experts over packed weights in one call, on the CPU. */
#ifndef RADIX_KERNELS_PACKED_EXPERTS_H
#define RADIX_KERNELS_PACKED_EXPERTS_H

#include "radix_kernels/activation.h"
#include "radix_kernels/linear.h"
#include "radix_kernels/types.h"

/* An expert's weights: w1 [2 I, H], gate rows, then up rows; w2 [H, I]. */
typedef struct rk_packed_expert {
  const rk_packed_desc* w1_desc;
  const rk_tensor* w1;
  const rk_packed_desc* w2_desc;
  const rk_tensor* w2;
} rk_packed_expert;

/* out[t] = sum over k of topk_weights[t, k] * (W2[e] act(gate, up) + bias2[e]), e = topk_ids[t, k], gate and up the
 * halves of W1[e] hidden_states[t] + bias1[e], act that of gating (zeros: SiLU). bias1 [num_experts, 2 I], bias2
 * [num_experts, H] (optional): fp32 or of the weights' dtype, contiguous. All experts have the shapes of the first.
 * hidden_states, out [T, H] of the weights' dtype, last dim contiguous; out may be hidden_states. topk_weights fp32,
 * topk_ids int32 [T, k], contiguous. A pair whose id is no expert adds nothing. expert_map (int32, optional): an
 * expert's local number, -1: elsewhere. An expert's products are those of rk_linear over its tokens at once, so that
 * its weights are read once: with RK_GATE_HALVES where I is a multiple of 16, else rk_linear, rounded, and the
 * activation. The activation's result and an expert's are rounded to the dtype; results are added in float32 in the
 * order of k and rounded once. A row's bits depend on no other row. workspace: uint8, contiguous, at least
 * rk_fused_experts_packed_workspace_size() of the same args (which needs no workspace). RK_UNSUPPORTED on a GPU. */
typedef struct rk_fused_experts_packed_args {
  uint32_t struct_size;
  int32_t num_experts;
  const rk_packed_expert* experts;
  const rk_tensor* hidden_states;
  const rk_tensor* topk_weights;
  const rk_tensor* topk_ids;
  const rk_tensor* expert_map;
  const rk_tensor* out;
  const rk_tensor* workspace;
  const rk_tensor* bias1;
  const rk_tensor* bias2;
  rk_gating gating;
} rk_fused_experts_packed_args;
RK_API rk_status rk_fused_experts_packed(const rk_fused_experts_packed_args* args, rk_stream stream);
RK_API rk_status rk_fused_experts_packed_workspace_size(const rk_fused_experts_packed_args* args, int64_t* bytes);

#endif
