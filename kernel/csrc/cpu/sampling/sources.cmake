radix_cpu_family(sampling
  BACKEND sampling.cpp row.cpp logprobs.cpp  # compiled once
  KERNELS passes.cpp)                        # compiled once per ISA level
