// What a backend implements for the fused_rope family. Arguments were checked by api/fused_rope.cpp.
#pragma once

#include "radix_kernels/fused_rope.h"

namespace radix::backend {

void fused_qk_norm_rope_store(const rk_fused_qk_norm_rope_store_args& args, rk_stream stream);

}  // namespace radix::backend
