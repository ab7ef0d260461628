radix_gpu_family(quantize quantize.cu quantize_int8.cu)
