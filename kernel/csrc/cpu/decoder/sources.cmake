radix_cpu_family(decoder)  # the entry in api/decoder.cpp calls the entries of other families
