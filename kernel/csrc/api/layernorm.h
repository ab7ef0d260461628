// What a backend implements for layernorm. Arguments were checked by api/layernorm.cpp.
#pragma once

#include "radix_kernels/layernorm.h"

namespace radix::backend {

void layernorm(const rk_layernorm_args& args, rk_stream stream);

}  // namespace radix::backend
