radix_sm90_family(gemm gemm.cu skinny_bf16.cu skinny_f16.cu narrow_bf16.cu narrow_f16.cu narrow_fp8.cu
                    wide_bf16.cu wide_f16.cu
                    wide_fp8_bf16.cu wide_fp8_f16.cu)
