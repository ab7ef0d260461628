radix_cpu_family(linear
  BACKEND pack.cpp       # compiled once
  KERNELS linear.cpp)    # compiled once per ISA level
