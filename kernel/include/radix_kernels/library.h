/* What the library says about itself. None of these can fail except where a status is returned. */
#ifndef RADIX_KERNELS_LIBRARY_H
#define RADIX_KERNELS_LIBRARY_H

#include "radix_kernels/types.h"

RK_API int32_t rk_abi_version(void);
/* The wheel's version, e.g. "0.1.0". */
RK_API const char* rk_version(void);
/* "cpu", "cuda" or "rocm". */
RK_API const char* rk_backend(void);
/* The text of the last error on the calling thread; valid until the next failing call on it. */
RK_API const char* rk_last_error(void);
/* Names the code path that runs here, e.g. "avx512" on the CPU; a static string in *name. */
RK_API rk_status rk_isa(const char** name);

#endif
