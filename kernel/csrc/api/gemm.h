// What a backend implements for the gemm family. Arguments were checked by api/gemm.cpp.
#pragma once

#include "radix_kernels/gemm.h"

namespace radix::backend {

void linear_dense(const rk_linear_dense_args& args, rk_stream stream);
void fp8_scaled_mm(const rk_fp8_scaled_mm_args& args, rk_stream stream);
void int8_scaled_mm(const rk_int8_scaled_mm_args& args, rk_stream stream);
void fp8_blockwise_scaled_mm(const rk_fp8_blockwise_scaled_mm_args& args, rk_stream stream);
void bmm_fp8(const rk_bmm_fp8_args& args, rk_stream stream);

}  // namespace radix::backend
