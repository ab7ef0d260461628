// What a backend implements for the mla_kv family. Arguments were checked by api/mla_kv.cpp; T and N may be 0.
#pragma once

#include "radix_kernels/mla_kv.h"

namespace radix::backend {

void store_mla_kv(const rk_store_mla_kv_args& args, rk_stream stream);
void gather_mla_kv(const rk_gather_mla_kv_args& args, rk_stream stream);
void concat_mla_k(const rk_concat_mla_k_args& args, rk_stream stream);

}  // namespace radix::backend
