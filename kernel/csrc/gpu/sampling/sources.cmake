radix_gpu_family(sampling sampling.cu penalties.cu)
radix_gpu_family(sampling_shards sampling_shards.cu)
