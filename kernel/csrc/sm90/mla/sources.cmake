radix_sm90_family(mla mla.cu decode_split_fixed.cu)
radix_instantiate(mla decode_swap_qk_h16 "void swap_qk_h16::launch<@>(const WgmmaArgs&, rk_stream)" VARIANTS bf16 f16)
radix_instantiate(mla decode_cluster_h16 "void cluster_h16::launch<@>(const WgmmaArgs&, rk_stream)"
                  VARIANTS "bf16, 8" "f16, 8")
radix_instantiate(mla decode_wgmma_h64 "void wgmma_h64::launch<@>(const WgmmaArgs&, rk_stream)"
                  VARIANTS "bf16, bf16" "f16, f16" "bf16, e4m3")
