// What a backend implements for the attention family. Arguments were checked by api/attention.cpp.
#pragma once

#include "radix_kernels/attention.h"

namespace radix::backend {

void flash_attn_with_kvcache(const rk_flash_attn_with_kvcache_args& args, rk_stream stream);
void flash_attn_varlen(const rk_flash_attn_varlen_args& args, rk_stream stream);
int64_t flash_attn_workspace_size(const rk_flash_attn_sizes& sizes);

}  // namespace radix::backend
