radix_cpu_family(mla_kv BACKEND mla_kv.cpp)  # copies bits, and rounds few: no kernel a level
