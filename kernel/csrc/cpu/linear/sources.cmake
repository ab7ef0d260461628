radix_cpu_family(linear
  BACKEND pack.cpp argmax.cpp  # compiled once
  KERNELS linear.cpp quantized.cpp supers.cpp widened.cpp pack_quantized.cpp pack_supers.cpp)  # compiled once per ISA level
