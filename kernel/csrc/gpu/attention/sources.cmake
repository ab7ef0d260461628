radix_gpu_family(merge_state merge_state.cu)
