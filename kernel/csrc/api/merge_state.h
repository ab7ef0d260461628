// What a backend implements for merge_state. Arguments were checked by api/merge_state.cpp.
#pragma once

#include "radix_kernels/attention.h"

namespace radix::backend {

void merge_state(const rk_merge_state_args& args, rk_stream stream);

}  // namespace radix::backend
