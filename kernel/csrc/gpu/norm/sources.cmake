radix_gpu_family(norm norm.cu)
