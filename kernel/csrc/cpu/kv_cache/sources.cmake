radix_cpu_family(kv_cache BACKEND store.cpp KERNELS quantize.cpp)
