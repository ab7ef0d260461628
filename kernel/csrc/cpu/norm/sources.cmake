radix_cpu_family(norm
  BACKEND norm.cpp      # compiled once
  KERNELS rmsnorm.cpp)  # compiled once per ISA level
