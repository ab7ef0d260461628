// What a backend implements for the decoder family, beside the entries of other families.
#pragma once

#include "radix_kernels/types.h"

namespace radix::backend {

// to += x: contiguous, of one shape and dtype; rounded once.
void decoder_add(const rk_tensor& to, const rk_tensor& x);

}  // namespace radix::backend
