radix_gpu_family(quantize quantize.cu)
