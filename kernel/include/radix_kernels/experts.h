/* The experts' products of a mixture-of-experts layer, fused and grouped. CUDA on Hopper. */
#ifndef RADIX_KERNELS_EXPERTS_H
#define RADIX_KERNELS_EXPERTS_H

#include "radix_kernels/activation.h"
#include "radix_kernels/types.h"

/* out[t] = sum over k of topk_weights[t, k] * W2[e] @ (silu(gate) * up), e = topk_ids[t, k]; gate and up are the halves
 * of W1[e] @ hidden_states[t].
 * hidden_states [T, H] and out [T, H] (may not overlap), bf16 or fp16, last dim contiguous. w1 [E, 2 I, H] and
 * w2 [E, H, I], contiguous, of the same dtype; E at most 1024; H and I multiples of 8. Rows begin at multiples of 16
 * bytes. Or weights of float8_e4m3fn with fp32 scales w1_scale and w2_scale: [E], or one a block of 128 x 128, [E,
 * ceil(rows / 128), ceil(columns / 128)]; H and I multiples of 16 then. They are widened exactly (for bf16 a NaN counts
 * as 480: quantisation makes none). topk_weights fp32 and topk_ids int32 [T, k], contiguous; a pair whose id is outside
 * of the experts adds nothing. expert_map int32 [n] (n at most 1024), optional: an expert's local number, -1: it is not
 * here. workspace: uint8 [rk_fused_experts_workspace_size], 256-byte aligned. Weights may not be written by a kernel
 * that is still in flight two launches earlier in the stream: they are read ahead. act = silu(gate) * up is rounded to
 * the dtype; above 16 tokens or 128 pairs so is an expert's result for a token. use_fp8_w8a8 (with block scales; H and
 * I multiples of 128): hidden_states and the rounded act are quantised to float8_e4m3fn with a scale for 128 columns of
 * a row, max(largest absolute value, 1e-10) / 448, and the products are of FP8; an expert's result is rounded to the
 * dtype. RK_UNSUPPORTED for other dtypes, sizes and alignments. */
typedef struct rk_fused_experts_args {
  uint32_t struct_size;
  const rk_tensor* hidden_states;
  const rk_tensor* w1;
  const rk_tensor* w2;
  const rk_tensor* topk_weights;
  const rk_tensor* topk_ids;
  const rk_tensor* w1_scale;
  const rk_tensor* w2_scale;
  const rk_tensor* expert_map;
  const rk_tensor* out;
  const rk_tensor* workspace;
  int32_t use_fp8_w8a8;
} rk_fused_experts_args;
RK_API rk_status rk_fused_experts(const rk_fused_experts_args* args, rk_stream stream);

typedef struct rk_fused_experts_sizes {
  uint32_t struct_size;
  int64_t tokens;
  int64_t topk;
  int64_t named_experts; /* of expert_map; without one, of w1 */
  int64_t hidden_size;
  int64_t inter_size;
} rk_fused_experts_sizes;
RK_API rk_status rk_fused_experts_workspace_size(const rk_fused_experts_sizes* sizes, int64_t* bytes);

/* As rk_fused_experts with weights of 4 or 8 bits. Up to 1,024 pairs (token, expert), and up to 8 an expert that may be
 * named (of expert_map; without one, of w1) in the mean, the weights' values are exact; of more pairs each, (code -
 * zero point) times scale, is rounded to x's dtype once (MXFP4 in bf16: exact). w1, w2: uint8 [E, bytes], last dim
 * contiguous, experts at multiples of 16 bytes: each a weight [2 I, H] or [H, I] in RK_LAYOUT_FRAGMENTS64. kind:
 * RK_WEIGHT_INT4 (group 32, 64, 128 or 0 for whole rows; scales bf16, fp16 or fp32; zeros: 1 where codes have zero
 * points of their own), RK_WEIGHT_INT8 (group 128 or 0, scales alike) or RK_WEIGHT_MXFP4 (group 32, scales uint8). H a
 * multiple of 8, I of 16. bias1 [E, 2 I], bias2 [E, H], optional, of x's dtype or fp32, contiguous: added to a product
 * before the activation, or before its rounding. activation, alpha and limit: as of rk_gating, SiLU or the clamped
 * SwiGLU. act and an expert's result for a token are rounded to the dtype; results are added in float32 in the order of
 * k and rounded once. workspace: as rk_fused_experts. RK_UNSUPPORTED for other kinds, groups, activations, sizes and
 * alignments. */
typedef struct rk_fused_experts_mixed_args {
  uint32_t struct_size;
  uint32_t kind;
  uint32_t group;
  uint32_t zeros;
  rk_dtype scale_dtype;
  int32_t activation;
  int64_t inter_size;
  const rk_tensor* hidden_states;
  const rk_tensor* w1;
  const rk_tensor* w2;
  const rk_tensor* bias1;
  const rk_tensor* bias2;
  const rk_tensor* topk_weights;
  const rk_tensor* topk_ids;
  const rk_tensor* expert_map;
  const rk_tensor* out;
  const rk_tensor* workspace;
  float alpha;
  float limit;
} rk_fused_experts_mixed_args;
RK_API rk_status rk_fused_experts_mixed(const rk_fused_experts_mixed_args* args, rk_stream stream);

/* Rows of x by the weight of their group: weight [E, N, K], contiguous, E at most 1024, N and K multiples of 8 (FP8: N
 * of 8, K of 16), rows at multiples of 16 bytes. Two layouts: x [M, K], out [M, N], groups int32 [M]: a row's group,
 * -1: padding. Each group begins at a multiple of 128; 128 rows from there on are of it, or padding behind it. x [E, M,
 * K], out [E, M, N], groups int32 [E]: how many of a group's rows count; the groups of x and of out lie M rows apart.
 * expected_m: about how many those are (tiles follow it, results do not). x and weight bf16 or fp16 and out of their
 * dtype; or float8_e4m3fn, out bf16, with fp32 x_scale (one a row and 128 of K) and weight_scale [E, ceil(N / 128),
 * ceil(K / 128)], contiguous. Rows of no group are not written. workspace: uint8 [rk_m_grouped_gemm_workspace_size],
 * 256-byte aligned. RK_UNSUPPORTED for other dtypes, sizes and strides. */
typedef struct rk_m_grouped_gemm_args {
  uint32_t struct_size;
  int32_t expected_m;
  const rk_tensor* x;
  const rk_tensor* weight;
  const rk_tensor* groups;
  const rk_tensor* x_scale;
  const rk_tensor* weight_scale;
  const rk_tensor* out;
  const rk_tensor* workspace;
} rk_m_grouped_gemm_args;
RK_API rk_status rk_m_grouped_gemm(const rk_m_grouped_gemm_args* args, rk_stream stream);

typedef struct rk_m_grouped_gemm_sizes {
  uint32_t struct_size;
  int32_t fp8;
  int64_t rows; /* of x, of all groups together */
  int64_t groups;
  int64_t k;
} rk_m_grouped_gemm_sizes;
RK_API rk_status rk_m_grouped_gemm_workspace_size(const rk_m_grouped_gemm_sizes* sizes, int64_t* bytes);

#endif
