// What a backend implements for the family of the experts' products. Arguments were checked by api/experts.cpp.
#pragma once

#include "radix_kernels/experts.h"

namespace radix::backend {

void fused_experts(const rk_fused_experts_args& args, rk_stream stream);
int64_t fused_experts_workspace_size(const rk_fused_experts_sizes& sizes);
void fused_experts_mixed(const rk_fused_experts_mixed_args& args, rk_stream stream);
// Of an expert's packed weight [n, k].
int64_t mixed_weight_bytes(const rk_fused_experts_mixed_args& args, int64_t n, int64_t k);
void m_grouped_gemm(const rk_m_grouped_gemm_args& args, rk_stream stream);
int64_t m_grouped_gemm_workspace_size(const rk_m_grouped_gemm_sizes& sizes);

}  // namespace radix::backend
