/* Normalisation over the last dimension. */
#ifndef RADIX_KERNELS_NORM_H
#define RADIX_KERNELS_NORM_H

#include "radix_kernels/types.h"

/* out = input / sqrt(mean(input^2, last dim) + eps) * weight; computed in float32, rounded once.
 * input, out [..., H]: bf16, fp16 or fp32, last dim contiguous, other strides free; out may be input itself.
 * weight [H]: input's dtype or fp32. */
typedef struct rk_rmsnorm_args {
  uint32_t struct_size;
  float eps;
  const rk_tensor* input;
  const rk_tensor* weight;
  const rk_tensor* out;
} rk_rmsnorm_args;
RK_API rk_status rk_rmsnorm(const rk_rmsnorm_args* args, rk_stream stream);

/* In place: input = rmsnorm(input + residual), the sum in float32; residual = that sum, rounded once to the dtype.
 * input, residual [..., H] of one shape and dtype. */
typedef struct rk_fused_add_rmsnorm_args {
  uint32_t struct_size;
  float eps;
  const rk_tensor* input;
  const rk_tensor* residual;
  const rk_tensor* weight;
} rk_fused_add_rmsnorm_args;
RK_API rk_status rk_fused_add_rmsnorm(const rk_fused_add_rmsnorm_args* args, rk_stream stream);

#endif
