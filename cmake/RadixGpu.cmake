# The single-source GPU kernels: what CUDA and ROCm compile alike, csrc/gpu/<name>.cu.
radix_family(norm rope activation kv_cache sampling)
set(RADIX_GPU_SOURCES backend norm rope activation kv_cache sampling logprobs)
list(TRANSFORM RADIX_GPU_SOURCES REPLACE "(.+)" "${RADIX_CSRC}/gpu/\\1.cu")
