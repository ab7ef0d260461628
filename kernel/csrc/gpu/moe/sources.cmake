radix_gpu_family(moe moe.cu)
