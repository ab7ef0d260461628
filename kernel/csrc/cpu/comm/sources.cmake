radix_cpu_family(comm
  BACKEND group.cpp   # compiled once
  KERNELS sum.cpp)    # compiled once per ISA level
