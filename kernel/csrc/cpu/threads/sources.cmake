radix_cpu_family(threads)  # the C entries over cpu/thread_pool.h; there is no kernel
