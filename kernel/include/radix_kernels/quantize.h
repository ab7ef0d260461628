/* Quantization. To FP8: float8_e4m3fn (largest 448) or float8_e4m3fnuz (240), as out says.
 *
 * scale = max(largest absolute value, 1e-10) / largest of the format; out = round(value / scale), to nearest even and
 * clamped, NaN stays NaN. Values and scales are computed in float32. Inputs [..., h] are bf16, fp16 or fp32 with a
 * contiguous last dimension; rows of input and out begin at multiples of 16 bytes (out: of the bytes of 8 values) and h
 * is a multiple of 16; out [..., h] has a contiguous last dimension. Scales are fp32 with any strides.
 *
 * To INT8, a scale a row: scale = largest / 127, out = round(value * (127 / largest)), to nearest even. A row of zeros
 * has scale 0; one with a NaN or an infinity has scale NaN; both have codes of 0. */
#ifndef RADIX_KERNELS_QUANTIZE_H
#define RADIX_KERNELS_QUANTIZE_H

#include "radix_kernels/types.h"

/* One scale [1] for all. is_static: scale is given and only read; else it is computed and written. */
typedef struct rk_per_tensor_quant_fp8_args {
  uint32_t struct_size;
  int32_t is_static;
  const rk_tensor* input;
  const rk_tensor* out;
  const rk_tensor* scale;
} rk_per_tensor_quant_fp8_args;
RK_API rk_status rk_per_tensor_quant_fp8(const rk_per_tensor_quant_fp8_args* args, rk_stream stream);

/* group_size 0: one scale a row, scales [..., 1]. group_size 64 or 128: one for that many columns, scales
 * [..., h / group_size]. gated: input is [..., 2 h] and value = silu(input[j]) * input[h + j], not rounded before. */
typedef struct rk_per_token_quant_fp8_args {
  uint32_t struct_size;
  int32_t group_size;
  int32_t gated;
  const rk_tensor* input;
  const rk_tensor* out;
  const rk_tensor* scales;
} rk_per_token_quant_fp8_args;
RK_API rk_status rk_per_token_quant_fp8(const rk_per_token_quant_fp8_args* args, rk_stream stream);

/* value = x / sqrt(mean(x^2) + eps) * weight, not rounded before; x = input, or with a residual (as input)
 * x = input + residual, which residual keeps, rounded to its dtype. weight [h]: input's dtype or fp32. Groups as above.
 */
typedef struct rk_rmsnorm_quant_fp8_args {
  uint32_t struct_size;
  int32_t group_size;
  float eps;
  const rk_tensor* input;
  const rk_tensor* residual;
  const rk_tensor* weight;
  const rk_tensor* out;
  const rk_tensor* scales;
} rk_rmsnorm_quant_fp8_args;
RK_API rk_status rk_rmsnorm_quant_fp8(const rk_rmsnorm_quant_fp8_args* args, rk_stream stream);

/* rk_per_token_quant_fp8 to int8 out, with scales [..., 1]. */
typedef struct rk_per_token_quant_int8_args {
  uint32_t struct_size;
  int32_t gated;
  const rk_tensor* input;
  const rk_tensor* out;
  const rk_tensor* scales;
} rk_per_token_quant_int8_args;
RK_API rk_status rk_per_token_quant_int8(const rk_per_token_quant_int8_args* args, rk_stream stream);

/* rk_rmsnorm_quant_fp8 to int8 out, with scales [..., 1]. */
typedef struct rk_rmsnorm_quant_int8_args {
  uint32_t struct_size;
  float eps;
  const rk_tensor* input;
  const rk_tensor* residual;
  const rk_tensor* weight;
  const rk_tensor* out;
  const rk_tensor* scales;
} rk_rmsnorm_quant_int8_args;
RK_API rk_status rk_rmsnorm_quant_int8(const rk_rmsnorm_quant_int8_args* args, rk_stream stream);

#endif
