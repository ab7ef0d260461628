// What a GPU backend implements for sampling from shards. Arguments were checked by api/sampling_shards.cpp.
#pragma once

#include "radix_kernels/sampling_shards.h"

namespace radix::backend {

constexpr int64_t kMostCandidates = 2048;  // of all shards together

void sampling_candidates(const rk_sampling_candidates_args& args, rk_stream stream);
void sample_candidates(const rk_sample_candidates_args& args, rk_stream stream);

}  // namespace radix::backend
