/* Rotary position embedding. */
#ifndef RADIX_KERNELS_ROPE_H
#define RADIX_KERNELS_ROPE_H

#include "radix_kernels/types.h"

/* In place: rotates the first rotary_dim elements of every head of query and key by the row of cos_sin_cache that the
 * token's position names; computed in float32, rounded once. The elements past rotary_dim are not touched.
 * positions [T]: int32 or int64. query [T, Hq * head_size] or [T, Hq, head_size]: bf16, fp16 or fp32, last dim
 * contiguous, other strides free; key likewise with its own number of heads, or NULL.
 * cos_sin_cache [max_position, rotary_dim]: fp32, rotary_dim/2 cosines then as many sines; rotary_dim <= 1024.
 * is_neox != 0: pairs are (i, i + rotary_dim/2); otherwise (2i, 2i + 1).
 * A position outside the cache is RK_INVALID on the CPU, before anything is written. */
typedef struct rk_apply_rope_inplace_args {
  uint32_t struct_size;
  int32_t head_size;
  int32_t is_neox;
  const rk_tensor* positions;
  const rk_tensor* query;
  const rk_tensor* key;
  const rk_tensor* cos_sin_cache;
} rk_apply_rope_inplace_args;
RK_API rk_status rk_apply_rope_inplace(const rk_apply_rope_inplace_args* args, rk_stream stream);

#endif
