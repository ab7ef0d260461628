/* Layer normalisation, on the CPU. */
#ifndef RADIX_KERNELS_LAYERNORM_H
#define RADIX_KERNELS_LAYERNORM_H

#include "radix_kernels/types.h"

/* out = (input - mean) / sqrt(variance + eps) * weight + bias, mean and (biased) variance over the last dim; computed
 * in float32, the variance from the differences, rounded once. input, out [..., H]: bf16, fp16 or fp32, last dim
 * contiguous, other strides free; out may be input itself. weight, bias [H] (optional, each): input's dtype or fp32. */
typedef struct rk_layernorm_args {
  uint32_t struct_size;
  float eps;
  const rk_tensor* input;
  const rk_tensor* weight;
  const rk_tensor* bias;
  const rk_tensor* out;
} rk_layernorm_args;
RK_API rk_status rk_layernorm(const rk_layernorm_args* args, rk_stream stream);

#endif
