radix_gpu_family(kv_cache kv_cache.cu)
radix_gpu_family(mla_kv mla_kv.cu)
