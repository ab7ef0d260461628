/* The CPU backend's thread pool. The pool belongs to the library: one a process, made at first use. */
#ifndef RADIX_KERNELS_THREADS_H
#define RADIX_KERNELS_THREADS_H

#include "radix_kernels/types.h"

/* Sets how many threads an op may use, the caller included (1 to 1024). pin != 0 binds each worker to its own CPU of
 * the process's affinity mask; the calling thread stays the caller's to bind. With more threads than CPUs nothing is
 * pinned and idle workers sleep at once. Results do not depend on the number. Waits for a running op to end. */
RK_API rk_status rk_set_num_threads(int32_t n, int32_t pin);
/* Default: the CPUs of the affinity mask, cut to the cgroup's quota. */
RK_API rk_status rk_get_num_threads(int32_t* n);

#endif
