radix_cpu_family(decoder BACKEND decoder.cpp KERNELS add.cpp)
