radix_gpu_family(step step.cu)
