/* What stands between the QKV projection and attention, in one pass. */
#ifndef RADIX_KERNELS_FUSED_ROPE_H
#define RADIX_KERNELS_FUSED_ROPE_H

#include "radix_kernels/types.h"

/* Normalises every head of q and k (RMSNorm over the head, weights q_weight and k_weight; both NULL: not at all),
 * rotates its first rotary_dim elements as rk_apply_rope_inplace does, writes q in place, and k and v to their slots as
 * rk_store_kv_cache does. Computed in float32, rounded once; k and v themselves are not changed.
 * q [T, Hq, D], k and v [T, Hkv, D], k_cache and v_cache [pages, page_size, Hkv, D]: bf16, fp16 or fp32, one dtype,
 * last dim contiguous, other strides free; D even, at most 256. q_weight, k_weight [D]: that dtype or fp32.
 * cos_sin_cache [max_position, rotary_dim] fp32, last dim contiguous. positions [T]: int32 or int64. slot_mapping [T]:
 * int64, -1: the token's k and v are not stored.
 * INT8 (CPU) and FP8 (GPU): the caches and k_scale, v_scale are then those of rk_store_kv_cache; both scales are NULL
 * otherwise.
 * A position or slot out of range is RK_INVALID on the CPU, before anything is written; on a GPU the token is skipped.
 */
typedef struct rk_fused_qk_norm_rope_store_args {
  uint32_t struct_size;
  float eps;
  int32_t is_neox;
  const rk_tensor* q;
  const rk_tensor* k;
  const rk_tensor* v;
  const rk_tensor* q_weight;
  const rk_tensor* k_weight;
  const rk_tensor* cos_sin_cache;
  const rk_tensor* positions;
  const rk_tensor* k_cache;
  const rk_tensor* v_cache;
  const rk_tensor* slot_mapping;
  const rk_tensor* k_scale;
  const rk_tensor* v_scale;
} rk_fused_qk_norm_rope_store_args;
RK_API rk_status rk_fused_qk_norm_rope_store(const rk_fused_qk_norm_rope_store_args* args, rk_stream stream);

#endif
