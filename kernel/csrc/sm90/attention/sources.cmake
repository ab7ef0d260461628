radix_sm90_family(attention attention.cu decode.cu prefill.cu)
radix_instantiate(attention decode_kernel "void decode::launch<@>(const decode::Args&, rk_stream)"
                  VARIANTS bf16 f16 e4m3)
radix_instantiate(attention prefill_launch "void prefill::launch<@>(const prefill::Args&, rk_stream)"
                  VARIANTS bf16 f16 e4m3)
