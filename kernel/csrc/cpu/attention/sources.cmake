radix_cpu_family(attention
  BACKEND attention.cpp                                            # compiled once
  KERNELS prefill.cpp prefill_tiles.cpp decode.cpp merge_state.cpp)  # compiled once per ISA level
radix_family(merge_state)  # another family on GPUs
radix_family(mla)          # attention with one KV head
