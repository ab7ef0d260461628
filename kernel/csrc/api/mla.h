// What a backend implements for the MLA family. Arguments were checked by api/mla.cpp.
#pragma once

#include "radix_kernels/mla.h"

namespace radix::backend {

void mla_decode(const rk_mla_decode_args& args, rk_stream stream);
int64_t mla_decode_workspace_size(const rk_mla_decode_sizes& sizes);

}  // namespace radix::backend
