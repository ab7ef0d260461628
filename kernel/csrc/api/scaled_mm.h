// What a backend implements for the scaled_mm family. Arguments were checked by api/scaled_mm.cpp.
#pragma once

#include "radix_kernels/scaled_mm.h"

namespace radix::backend {

void int8_scaled_mm_sm80(const rk_int8_scaled_mm_args& args, rk_stream stream);
void fp8_scaled_mm_sm89(const rk_fp8_scaled_mm_args& args, rk_stream stream);
void fp8_scaled_mm_sm100(const rk_fp8_scaled_mm_args& args, rk_stream stream);

}  // namespace radix::backend
