radix_cpu_family(packed_experts BACKEND packed_experts.cpp)  # calls the entries of linear and activation
