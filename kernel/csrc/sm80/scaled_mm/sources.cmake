radix_sm80_family(scaled_mm HOST scaled_mm.cpp SM80 int8.cu SM89 fp8.cu SM100 ../../sm100/scaled_mm/fp8.cu)
