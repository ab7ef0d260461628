radix_cpu_family(linear
  BACKEND pack.cpp argmax.cpp                           # compiled once
  KERNELS linear.cpp quantized.cpp pack_quantized.cpp)  # compiled once per ISA level
