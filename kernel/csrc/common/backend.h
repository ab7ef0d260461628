// What every backend (cpu, cuda, rocm) provides besides its ops. The ops are declared family by family in
// api/<family>.h.
#pragma once

#include "radix_kernels/types.h"

namespace radix::backend {

// "cpu", "cuda" or "rocm".
const char* name();
// Can this backend's kernels work on memory of that device?
bool owns_device(rk_device device);
// The code path that runs here ("avx512", "sm_90"), for people. Throws Error when a requested one is not possible.
const char* isa();

}  // namespace radix::backend
