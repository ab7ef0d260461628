/* Gated activations. */
#ifndef RADIX_KERNELS_ACTIVATION_H
#define RADIX_KERNELS_ACTIVATION_H

#include "radix_kernels/types.h"

/* The gated activations of ops that take one by number: silu(gate) * up and its neighbours, as the entries below have
 * them, or (up + 1) * gate / (1 + e^(-alpha gate)) with gate at most limit and up within -limit .. limit. limit is
 * above 0; a NaN stays one. alpha and limit are those of RK_ACTIVATION_SWIGLU_CLAMPED and 0 beside others. */
enum { RK_ACTIVATION_SILU = 0, RK_ACTIVATION_GELU = 1, RK_ACTIVATION_GELU_TANH = 2, RK_ACTIVATION_SWIGLU_CLAMPED = 3 };
typedef struct rk_gating {
  int32_t activation;
  float alpha;
  float limit;
} rk_gating;

/* out = act(input[..., :I]) * input[..., I:]; computed in float32, rounded once.
 * input [..., 2I], out [..., I]: bf16, fp16 or fp32 of one dtype, last dim contiguous, other strides free. out may be
 * the first half of input itself. */
typedef struct rk_gated_activation_args {
  uint32_t struct_size;
  const rk_tensor* input;
  const rk_tensor* out;
} rk_gated_activation_args;

/* act(x) = x / (1 + e^-x) */
RK_API rk_status rk_silu_and_mul(const rk_gated_activation_args* args, rk_stream stream);
/* act(x) = x/2 (1 + erf(x / sqrt 2)) */
RK_API rk_status rk_gelu_and_mul(const rk_gated_activation_args* args, rk_stream stream);
/* act(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) */
RK_API rk_status rk_gelu_tanh_and_mul(const rk_gated_activation_args* args, rk_stream stream);

#endif
