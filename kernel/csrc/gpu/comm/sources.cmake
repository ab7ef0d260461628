radix_gpu_family(all_reduce all_reduce.cu all_reduce_norm.cu peer_group.cu)
