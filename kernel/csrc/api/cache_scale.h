// The scales of quantized keys and values, as attention reads and the store writes them.
#pragma once

#include "common/check.h"

namespace radix {

// float32, for each slot and head of an INT8 cache, for each head or all of them at once of an FP8 one.
inline void check_cache_scale(const Arg& scale, const Arg& cache) {
  scale.same_device(cache).dtype({DType::f32});
  if (cache.type() == DType::i8) {
    scale.shape({cache.size(0), cache.size(1), cache.size(2)}, "pages, page_size and heads of the cache");
    return;
  }
  scale.ndim(1);
  if (scale.size(0) != 1 && scale.size(0) != cache.size(-2))
    scale.reject(RK_INVALID, "has %lld elements, expected 1 or the %lld heads of %s", (long long)scale.size(0),
                 (long long)cache.size(-2), cache.name());
}

// A cache that rows of x's dtype are stored in, in that dtype or as INT8 (CPU) or FP8 (GPU), and its scale.
inline void check_stored_cache(const char* op, const Arg& x, const Arg& cache, const char* scale_name,
                               const rk_tensor* scale) {
  const bool int8 = cache.type() == DType::i8, cpu = x->device.type == RK_DEVICE_CPU;
  const bool fp8 = cache.type() == DType::f8e4m3 || cache.type() == DType::f8e4m3fnuz;
  cache.same_device(x).last_contiguous().writable();
  if (!int8 && !fp8) cache.same_dtype(x);
  if (int8 && !cpu) cache.reject(RK_UNSUPPORTED, "is int8, which the CPU alone has kernels for");
  if (fp8 && cpu) cache.reject(RK_UNSUPPORTED, "is FP8, which GPUs alone have kernels for");
  if ((int8 || fp8) != (scale != nullptr))
    fail(RK_INVALID, "%s: %s %s", op, scale_name,
         scale ? "is given, but the cache is neither FP8 nor INT8" : "is missing, FP8 and INT8 caches need it");
  if (!scale) return;
  const Arg a(op, scale_name, scale);
  check_cache_scale(a, cache);
  if (int8) a.writable();
}

}  // namespace radix
