/* The paged KV cache. */
#ifndef RADIX_KERNELS_KV_CACHE_H
#define RADIX_KERNELS_KV_CACHE_H

#include "radix_kernels/types.h"

/* Copies row t of k and v to slot slot_mapping[t] of the caches: page s / page_size, offset s % page_size; -1 skips.
 * k [T, H, D], v [T, H, Dv], k_cache [pages, page_size, H, D], v_cache [pages, page_size, H, Dv]: bf16, fp16 or fp32,
 * cache and rows of one dtype, last dim contiguous, other strides free. slot_mapping [T]: int64.
 * A slot outside of -1 .. pages * page_size - 1 is RK_INVALID on the CPU, before anything is written.
 * INT8 (CPU): the caches are int8, and k_scale, v_scale float32 [pages, page_size, H] (both given, else both NULL) are
 * written too: of each row and head scale = max |x| / 127 and values round(x / scale) to nearest even, all 0 where the
 * scale is 0; x finite.
 * FP8 (GPU): the caches are e4m3 (fnuz on gfx942), and k_scale, v_scale float32 [1] or [H], above 0, are read: values
 * are x / scale, to nearest even, clamped to the largest finite one; NaN stays NaN. */
typedef struct rk_store_kv_cache_args {
  uint32_t struct_size;
  const rk_tensor* k;
  const rk_tensor* v;
  const rk_tensor* k_cache;
  const rk_tensor* v_cache;
  const rk_tensor* slot_mapping;
  const rk_tensor* k_scale;
  const rk_tensor* v_scale;
} rk_store_kv_cache_args;
RK_API rk_status rk_store_kv_cache(const rk_store_kv_cache_args* args, rk_stream stream);

#endif
