// What a backend implements for the norm family. Arguments were checked by api/norm.cpp.
#pragma once

#include "radix_kernels/norm.h"

namespace radix::backend {

void rmsnorm(const rk_rmsnorm_args& args, rk_stream stream);
void fused_add_rmsnorm(const rk_fused_add_rmsnorm_args& args, rk_stream stream);

}  // namespace radix::backend
