/* What multi-head latent attention moves: the latent cache's tokens, and the full keys of a prefill. */
#ifndef RADIX_KERNELS_MLA_KV_H
#define RADIX_KERNELS_MLA_KV_H

#include "radix_kernels/types.h"

/* Writes token t, latent [T, L] then rope [T, R], to slot slot_mapping[t] of kv_cache [pages, page_size, L + R]: page
 * s / page_size, offset s % page_size; -1 skips. bf16 or fp16, all of one dtype: bits are copied. Or, with bf16, L 512
 * and R 64, kv_cache uint8 [pages, page_size, 656]: 512 e4m3, each the value divided by the scale of its 128 and
 * rounded to nearest even, those 4 scales in float32, max(largest magnitude, 1e-10) / 448, and rope's bits; addresses
 * of rows multiples of 16 bytes. Last dims contiguous, other strides free. slot_mapping [T]: int64. A slot outside of
 * -1 .. pages * page_size - 1 is RK_INVALID on the CPU, before anything is written. */
typedef struct rk_store_mla_kv_args {
  uint32_t struct_size;
  const rk_tensor* latent;
  const rk_tensor* rope;
  const rk_tensor* kv_cache;
  const rk_tensor* slot_mapping;
} rk_store_mla_kv_args;
RK_API rk_status rk_store_mla_kv(const rk_store_mla_kv_args* args, rk_stream stream);

/* k [T, H, N + R] = k_nope [T, H, N], then k_rope [T, 1, R] for every head: bf16 or fp16, bits are copied. Last dims
 * contiguous, other strides free. */
typedef struct rk_concat_mla_k_args {
  uint32_t struct_size;
  const rk_tensor* k;
  const rk_tensor* k_nope;
  const rk_tensor* k_rope;
} rk_concat_mla_k_args;
RK_API rk_status rk_concat_mla_k(const rk_concat_mla_k_args* args, rk_stream stream);

#endif
