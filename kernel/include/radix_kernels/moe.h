/* Mixture of experts: routing, sorting of tokens by expert, and the sum over a token's experts. */
#ifndef RADIX_KERNELS_MOE_H
#define RADIX_KERNELS_MOE_H

#include "radix_kernels/types.h"

/* Common to the three routers: gating_output [T, E], bf16, fp16 or fp32, last dim contiguous, E at most 1024.
 * topk_weights fp32 and topk_ids int32 [T, k], contiguous, k at most min(E, 32), the best expert first; equal scores:
 * the lowest id first. A row with a NaN has NaN weights; its ids are distinct and in range, NaN last. Computed in
 * float32. */

/* Weights: the softmax over all experts at the chosen ones; with renormalize the softmax over the chosen ones; times
 * routed_scaling_factor. num_expert_group above 1 (at most 32): the experts are that many equal ranges of ids, a
 * group's score is its largest logit, the topk_group best groups stay (equal scores: the first), and the chosen ones
 * are in them. Of the k columns the last num_fused_shared_experts (0 to k - 1) are experts that every token goes to:
 * ids E, E + 1, ... with weight 1. */
typedef struct rk_topk_softmax_args {
  uint32_t struct_size;
  int32_t renormalize;
  const rk_tensor* gating_output;
  const rk_tensor* topk_weights;
  const rk_tensor* topk_ids;
  int32_t num_expert_group; /* 0 as 1 */
  int32_t topk_group;
  int32_t num_fused_shared_experts;
  float routed_scaling_factor; /* 0 as 1 */
} rk_topk_softmax_args;
RK_API rk_status rk_topk_softmax(const rk_topk_softmax_args* args, rk_stream stream);

/* s = sigmoid(gating_output). Chosen by s + correction_bias (fp32 [E]; NULL: by the logits). Weights: s, with
 * renormalize s / (sum over the chosen + 1e-20). num_fused_shared_experts: as of rk_topk_softmax. */
typedef struct rk_topk_sigmoid_args {
  uint32_t struct_size;
  int32_t renormalize;
  const rk_tensor* gating_output;
  const rk_tensor* correction_bias;
  const rk_tensor* topk_weights;
  const rk_tensor* topk_ids;
  int32_t num_fused_shared_experts;
} rk_topk_sigmoid_args;
RK_API rk_status rk_topk_sigmoid(const rk_topk_sigmoid_args* args, rk_stream stream);

/* Biased grouped routing (DeepSeek-V3): c = sigmoid(input) + bias; the experts are num_expert_group (at most 32) equal
 * ranges of ids; a group's score is the sum of its two largest c (of its one); the topk_group best groups stay, and the
 * top k of c in them are chosen. Weights: s / (sum over the chosen + 1e-20) * routed_scaling_factor.
 * Of the k columns the last num_fused_shared_experts (0 to k - 1) are experts that every token goes to: ids E, E + 1,
 * ... with weight 1. */
typedef struct rk_moe_fused_gate_args {
  uint32_t struct_size;
  int32_t num_expert_group;
  int32_t topk_group;
  float routed_scaling_factor;
  const rk_tensor* input;
  const rk_tensor* bias;
  const rk_tensor* topk_weights;
  const rk_tensor* topk_ids;
  int32_t num_fused_shared_experts;
} rk_moe_fused_gate_args;
RK_API rk_status rk_moe_fused_gate(const rk_moe_fused_gate_args* args, rk_stream stream);

/* Sorts the n = T * k entries of topk_ids (int32, contiguous) by expert, each expert's padded to whole blocks:
 * sorted_token_ids int32 [at least P] holds indices into the flat topk_ids, ascending within an expert, and n where it
 * pads; expert_ids int32 [at least P / block_size] names each block's expert; num_tokens_post_padded int32 [1].
 * P = (n + min(n, num_experts) * (block_size - 1)) rounded down to whole blocks. What lies past
 * num_tokens_post_padded is not written. Ids outside of 0 .. num_experts - 1 (at most 1024) are left out.
 * expert_map (int32 [num_experts], optional): the local number of an expert, -1: left out; expert_ids are local. */
typedef struct rk_moe_align_block_size_args {
  uint32_t struct_size;
  int32_t num_experts;
  int32_t block_size;
  const rk_tensor* topk_ids;
  const rk_tensor* expert_map;
  const rk_tensor* sorted_token_ids;
  const rk_tensor* expert_ids;
  const rk_tensor* num_tokens_post_padded;
} rk_moe_align_block_size_args;
RK_API rk_status rk_moe_align_block_size(const rk_moe_align_block_size_args* args, rk_stream stream);

/* out[t] = sum over k of input[t, k], in float32 and in the order of k, rounded once. input [T, k, H], out [T, H]:
 * bf16, fp16 or fp32 of one dtype, last dim contiguous. */
typedef struct rk_moe_sum_args {
  uint32_t struct_size;
  const rk_tensor* input;
  const rk_tensor* out;
} rk_moe_sum_args;
RK_API rk_status rk_moe_sum(const rk_moe_sum_args* args, rk_stream stream);

#endif
