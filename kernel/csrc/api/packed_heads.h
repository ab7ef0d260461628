// What the CPU implements for products of heads. Arguments were checked by api/packed_heads.cpp, weights are not yet.
#pragma once

#include "radix_kernels/packed_heads.h"

namespace radix::backend {

void linear_heads(const rk_linear_heads_args& args);

}  // namespace radix::backend
