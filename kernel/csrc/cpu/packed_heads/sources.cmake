radix_cpu_family(packed_heads BACKEND packed_heads.cpp)  # calls the kernels of linear
