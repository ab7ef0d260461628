// What a backend implements for the linear family. Arguments were checked by api/linear.cpp.
#pragma once

#include "radix_kernels/linear.h"

namespace radix {

// Throws Error unless rk_linear takes `args`; what the backend is to be given, with `desc`, the caller's memory, in it.
rk_linear_args checked_linear(const rk_linear_args* args, rk_packed_desc* desc);

namespace backend {

// Whether 4-bit codes may have one scale a row.
bool packs_whole_rows_of_nibbles();
// Fills desc.layout; the bytes of the packed storage.
int64_t packed_weight_info(rk_packed_desc& desc);
void pack_weight(const rk_pack_weight_args& args, rk_stream stream);
void unpack_weight(const rk_unpack_weight_args& args, rk_stream stream);
void linear(const rk_linear_args& args, rk_stream stream);
void linear_argmax(const rk_linear_argmax_args& args, rk_stream stream);
void embedding(const rk_embedding_args& args, rk_stream stream);

}  // namespace backend
}  // namespace radix
