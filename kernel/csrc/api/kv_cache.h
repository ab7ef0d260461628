// What a backend implements for the kv_cache family. Arguments were checked by api/kv_cache.cpp; T may be 0.
#pragma once

#include "radix_kernels/kv_cache.h"

namespace radix::backend {

void store_kv_cache(const rk_store_kv_cache_args& args, rk_stream stream);

}  // namespace radix::backend
