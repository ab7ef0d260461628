radix_cpu_family(rope BACKEND rope.cpp KERNELS rotate.cpp)
