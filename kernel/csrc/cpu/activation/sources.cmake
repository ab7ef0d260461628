radix_cpu_family(activation BACKEND activation.cpp KERNELS gated.cpp)
