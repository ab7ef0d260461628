radix_cpu_family(kv_cache BACKEND store.cpp)  # copies bits: no kernel a level
