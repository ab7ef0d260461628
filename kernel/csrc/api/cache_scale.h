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

}  // namespace radix
