radix_gpu_family(rope rope.cu)
radix_gpu_family(fused_rope fused_rope.cu)
