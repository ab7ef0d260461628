// What a backend implements for the rope family. Arguments were checked by api/rope.cpp; T may be 0.
#pragma once

#include "radix_kernels/rope.h"

namespace radix::backend {

void apply_rope_inplace(const rk_apply_rope_inplace_args& args, rk_stream stream);

}  // namespace radix::backend
