radix_cpu_family(layernorm BACKEND layernorm.cpp KERNELS rows.cpp)
