// What a GPU backend implements for the all_reduce family. Arguments were checked by api/all_reduce.cpp.
#pragma once

#include "radix_kernels/all_reduce.h"

namespace radix::backend {

void all_reduce(const rk_all_reduce_args& args, rk_stream stream);
void all_reduce_add_rmsnorm(const rk_all_reduce_add_rmsnorm_args& args, rk_stream stream);
void reduce_scatter(const rk_reduce_scatter_args& args, rk_stream stream);
void all_gather(const rk_all_gather_args& args, rk_stream stream);

}  // namespace radix::backend
