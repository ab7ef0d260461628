/* Dense products over plain row-major weights, on Hopper: few tokens in bf16 and fp16, any number in FP8 and INT8.
 *
 * A weight [n, k] stays as it is stored, so that the vendor's BLAS can read the same bytes. Rows of every operand begin
 * at a multiple of 16 bytes and k is a multiple of 16 bytes. Sums are float32 (of INT8 int32), rounded once, after
 * bias, gate and residual. Repeated calls give the same bits. */
#ifndef RADIX_KERNELS_GEMM_H
#define RADIX_KERNELS_GEMM_H

#include "radix_kernels/types.h"

/* How the rows of a weight pair up in out[:, j] = silu(gate_j) * up_j. */
enum {
  RK_GATE_NONE = 0,
  RK_GATE_HALVES = 1,     /* gate rows 0 .. n/2 - 1, then the up rows */
  RK_GATE_INTERLEAVED = 2 /* gate row 2j, up row 2j + 1 */
};

/* out [m, n] = x [m, k] * weight [n, k]^T + bias [n] (optional) + residual [m, n] (optional), bf16 or fp16;
 * bias also fp32, and out of up to 64 tokens. With a gate out and residual are [m, n / 2], n / 2 is a multiple of 8 and
 * bias must be NULL. Of more tokens rows of out and residual are multiples of 16 bytes, and begin at such.
 * static_weight: not 0 promises that nothing on the device still writes the weight when this is called, so that its
 * first bytes may be fetched while the kernel ahead still runs. A token's bits depend on neither the other tokens nor m
 * within 1 .. 16, 17 .. 64, 65 .. 128, 129 .. 256 and above. */
typedef struct rk_linear_dense_args {
  uint32_t struct_size;
  int32_t gate;
  int32_t static_weight;
  const rk_tensor* x;
  const rk_tensor* weight;
  const rk_tensor* bias;
  const rk_tensor* residual;
  const rk_tensor* out;
} rk_linear_dense_args;
RK_API rk_status rk_linear_dense(const rk_linear_dense_args* args, rk_stream stream);

/* out [m, n] = (mat_a * scales_a) [m, k] * (mat_b * scales_b) [k, n] + bias [n]: float8_e4m3fn operands, bf16 or fp16
 * out. mat_b is column-major (the transposed view of a weight [n, k]); scales fp32, scales_a [m] or [1], scales_b [n]
 * or [1] (a trailing or leading dimension of 1 is fine); bias out's dtype or fp32. k and n are multiples of 16.
 * fast_accum: not 0 allows sums that keep about 14 bits over all of k, not only over 128 of it. */
typedef struct rk_fp8_scaled_mm_args {
  uint32_t struct_size;
  int32_t gate; /* as in rk_linear_dense; the scales are those of the weight's rows */
  int32_t static_weight;
  int32_t fast_accum;
  const rk_tensor* mat_a;
  const rk_tensor* mat_b;
  const rk_tensor* scales_a;
  const rk_tensor* scales_b;
  const rk_tensor* bias;
  const rk_tensor* out;
} rk_fp8_scaled_mm_args;
RK_API rk_status rk_fp8_scaled_mm(const rk_fp8_scaled_mm_args* args, rk_stream stream);

/* The same of int8 operands, with int32 sums, which are exact:
 * out [m, n] = scales_a * scales_b * (mat_a * mat_b - azp * b_sums) + bias. azp: int32 [m] or [1], the codes of mat_a
 * (-128 .. 127) that stand for zero, or NULL with b_sums, int32 [n]: the sums of mat_b's columns. With a gate azp and
 * bias must be NULL. k and n are multiples of 16, k at most 131,056, with azp 65,792, so that no sum passes 32 bits. */
typedef struct rk_int8_scaled_mm_args {
  uint32_t struct_size;
  int32_t gate;
  int32_t static_weight;
  const rk_tensor* mat_a;
  const rk_tensor* mat_b;
  const rk_tensor* scales_a;
  const rk_tensor* scales_b;
  const rk_tensor* azp;
  const rk_tensor* b_sums;
  const rk_tensor* bias;
  const rk_tensor* out;
} rk_int8_scaled_mm_args;
RK_API rk_status rk_int8_scaled_mm(const rk_int8_scaled_mm_args* args, rk_stream stream);

/* rk_fp8_scaled_mm with a scale for every 128 elements of k: scales_a fp32 [m, k / 128] (any strides), scales_b fp32
 * [k / 128, n / 128] for blocks of 128 x 128, column-major as mat_b. k and n are multiples of 128. */
typedef struct rk_fp8_blockwise_scaled_mm_args {
  uint32_t struct_size;
  int32_t static_weight;
  const rk_tensor* mat_a;
  const rk_tensor* mat_b;
  const rk_tensor* scales_a;
  const rk_tensor* scales_b;
  const rk_tensor* out;
} rk_fp8_blockwise_scaled_mm_args;
RK_API rk_status rk_fp8_blockwise_scaled_mm(const rk_fp8_blockwise_scaled_mm_args* args, rk_stream stream);

/* out [b, m, n] = (a * a_scale) [b, m, k] * (b * b_scale) [b, k, n], every matrix of b column-major; scales fp32 of one
 * element. k and n are multiples of 16; out is contiguous. */
typedef struct rk_bmm_fp8_args {
  uint32_t struct_size;
  const rk_tensor* a;
  const rk_tensor* b;
  const rk_tensor* a_scale;
  const rk_tensor* b_scale;
  const rk_tensor* out;
} rk_bmm_fp8_args;
RK_API rk_status rk_bmm_fp8(const rk_bmm_fp8_args* args, rk_stream stream);

#endif
