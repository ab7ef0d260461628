// What a backend implements for the sampling family. Arguments were checked by api/sampling.cpp.
#pragma once

#include "radix_kernels/sampling.h"

namespace radix::backend {

void apply_penalties(const rk_apply_penalties_args& args, rk_stream stream);
void count_tokens(const rk_count_tokens_args& args, rk_stream stream);
// Bytes; 0: the backend needs no workspace and ignores one.
int64_t sampling_workspace_size(int64_t rows, int64_t columns);
void top_k_top_p_sampling(const rk_top_k_top_p_sampling_args& args, rk_stream stream);
void token_logprobs(const rk_token_logprobs_args& args, rk_stream stream);

}  // namespace radix::backend
