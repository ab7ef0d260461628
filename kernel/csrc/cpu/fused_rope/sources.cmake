radix_cpu_family(fused_rope BACKEND fused_rope.cpp KERNELS heads.cpp)
