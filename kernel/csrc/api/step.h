// What a backend implements for the step family. Arguments were checked by api/step.cpp; there may be no entries, no
// tokens and no samples of fill_step_tensors, but not none of all three.
#pragma once

#include "radix_kernels/step.h"

namespace radix::backend {

void fill_step_tensors(const rk_fill_step_tensors_args& args, rk_stream stream);
void accept_tokens(const rk_accept_tokens_args& args, rk_stream stream);

}  // namespace radix::backend
