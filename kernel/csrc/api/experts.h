// What a backend implements for the family of the experts' products. Arguments were checked by api/experts.cpp.
#pragma once

#include "radix_kernels/experts.h"

namespace radix::backend {

void fused_experts(const rk_fused_experts_args& args, rk_stream stream);
int64_t fused_experts_workspace_size(const rk_fused_experts_sizes& sizes);
void m_grouped_gemm(const rk_m_grouped_gemm_args& args, rk_stream stream);
int64_t m_grouped_gemm_workspace_size(const rk_m_grouped_gemm_sizes& sizes);

}  // namespace radix::backend
