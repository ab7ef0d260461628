radix_sm90_family(experts experts.cu grouped.cu order.cu few_bf16.cu few_f16.cu many_bf16.cu many_f16.cu many_bf16_fp8.cu
                    many_f16_fp8.cu many_bf16_w8a8.cu many_f16_w8a8.cu wide_experts.cu wide_fp8.cu
                    wide_tiles.cu)
