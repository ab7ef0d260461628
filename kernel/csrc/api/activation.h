// What a backend implements for the activation family. Arguments were checked by api/activation.cpp.
#pragma once

#include "radix_kernels/activation.h"

namespace radix::backend {

void silu_and_mul(const rk_gated_activation_args& args, rk_stream stream);
void gelu_and_mul(const rk_gated_activation_args& args, rk_stream stream);
void gelu_tanh_and_mul(const rk_gated_activation_args& args, rk_stream stream);

}  // namespace radix::backend
