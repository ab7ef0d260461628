radix_gpu_family(activation activation.cu)
