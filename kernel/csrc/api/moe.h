// What a backend implements for the MoE family. Arguments were checked by api/moe.cpp.
#pragma once

#include "radix_kernels/moe.h"

namespace radix::backend {

void topk_softmax(const rk_topk_softmax_args& args, rk_stream stream);
void topk_sigmoid(const rk_topk_sigmoid_args& args, rk_stream stream);
void moe_fused_gate(const rk_moe_fused_gate_args& args, rk_stream stream);
void moe_align_block_size(const rk_moe_align_block_size_args& args, rk_stream stream);
void moe_sum(const rk_moe_sum_args& args, rk_stream stream);

}  // namespace radix::backend
