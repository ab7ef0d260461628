// What a backend implements for the quantize family. Arguments were checked by api/quantize.cpp.
#pragma once

#include "radix_kernels/quantize.h"

namespace radix::backend {

void per_tensor_quant_fp8(const rk_per_tensor_quant_fp8_args& args, rk_stream stream);
void per_token_quant_fp8(const rk_per_token_quant_fp8_args& args, rk_stream stream);
void rmsnorm_quant_fp8(const rk_rmsnorm_quant_fp8_args& args, rk_stream stream);
void per_token_quant_int8(const rk_per_token_quant_int8_args& args, rk_stream stream);
void rmsnorm_quant_int8(const rk_rmsnorm_quant_int8_args& args, rk_stream stream);

}  // namespace radix::backend
