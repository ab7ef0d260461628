/* The HIP runtime behind a ROCm library, which finds it when a function first needs it. */
#ifndef RADIX_KERNELS_HIP_H
#define RADIX_KERNELS_HIP_H

#include "radix_kernels/types.h"

/* Files of the runtime that other packages of the process will load, such as torch's, the preferred one first: with no
 * runtime loaded the first that can be opened is used, before those of the system. Copies the strings. */
RK_API rk_status rk_hip_set_bundled(const char* const* paths, int32_t count);
/* The file of the runtime in use, or "" and in *problem why there is none. *path and *problem stay valid. */
RK_API rk_status rk_hip_runtime(const char** path, const char** problem);

#endif
