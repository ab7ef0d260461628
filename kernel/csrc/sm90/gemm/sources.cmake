radix_sm90_family(gemm gemm.cu)
radix_instantiate(gemm mma_m16 "void mma_m16<@>(const Problem&)" VARIANTS bf16 f16)
radix_instantiate(gemm wgmma_swap_ab "void wgmma_swap_ab<@>(const Problem&)" VARIANTS bf16 f16 e4m3 int8_t)
radix_instantiate(gemm wgmma_swap_ab_many "void wgmma_swap_ab_many<@>(const Problem&, int)" VARIANTS bf16 f16)
radix_instantiate(gemm wgmma_persistent "void wgmma_persistent<@>(const Problem&)"
                  VARIANTS "bf16, bf16" "f16, f16" "e4m3, bf16" "e4m3, f16" "int8_t, bf16" "int8_t, f16")
