/* What multi-head latent attention moves: tokens into the latent cache and out of it, and the full keys of a prefill.
 */
#ifndef RADIX_KERNELS_MLA_KV_H
#define RADIX_KERNELS_MLA_KV_H

#include "radix_kernels/types.h"

/* Writes token t, latent [T, L] then rope [T, R], to slot slot_mapping[t] of kv_cache [pages, page_size, L + R]: page
 * s / page_size, offset s % page_size; -1 skips. bf16, fp16 or fp32, all of one dtype: bits are copied. Or, with bf16,
 * L 512 and R 64, kv_cache uint8 [pages, page_size, 656]: 512 e4m3, each the value divided by the scale of its 128 and
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

/* out [N, L + R] = tokens of the cache, row after row: row b's are those at its positions first, first + 1, ..., where
 * first is starts[b], or 0 without starts, and they lie in out from cu_seqlens[b] to cu_seqlens[b + 1], int32 [B + 1]
 * from 0 to N. kv_cache [pages, page_size, L + R] of out's dtype (bf16, fp16, fp32): bits are copied; or uint8 [pages,
 * page_size, 656] with out bf16 [N, 576]: e4m3 times scale, rounded to nearest even. page_table int32 [B, max_pages],
 * starts int32 [B] or NULL. Last dims contiguous, other strides free; the FP8 form: addresses of rows multiples of 16
 * bytes. A position or page that is not there is RK_INVALID on the CPU; on a GPU its token is zeros. */
typedef struct rk_gather_mla_kv_args {
  uint32_t struct_size;
  const rk_tensor* kv_cache;
  const rk_tensor* page_table;
  const rk_tensor* cu_seqlens;
  const rk_tensor* starts;
  const rk_tensor* out;
} rk_gather_mla_kv_args;
RK_API rk_status rk_gather_mla_kv(const rk_gather_mla_kv_args* args, rk_stream stream);

/* k [T, H, N + R] = k_nope [T, H, N], then k_rope [T, 1, R] for every head: one dtype, bits are copied. Last dims
 * contiguous, other strides free. */
typedef struct rk_concat_mla_k_args {
  uint32_t struct_size;
  const rk_tensor* k;
  const rk_tensor* k_nope;
  const rk_tensor* k_rope;
} rk_concat_mla_k_args;
RK_API rk_status rk_concat_mla_k(const rk_concat_mla_k_args* args, rk_stream stream);

#endif
