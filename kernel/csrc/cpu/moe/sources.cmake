radix_cpu_family(moe BACKEND moe.cpp align.cpp KERNELS route.cpp)
