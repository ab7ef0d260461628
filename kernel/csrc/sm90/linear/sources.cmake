radix_sm90_family(linear linear.cu pack.cu rows.cu)
radix_instantiate(linear mixed_mma "void mixed_mma<@>(const Problem&)"
                  VARIANTS "bf16, Code::u4, 32" "bf16, Code::u4, 64" "bf16, Code::u4, 128" "bf16, Code::e2m1, 32"
                  "bf16, Code::s8, 32" "bf16, Code::s8, 64" "bf16, Code::s8, 128" "f16, Code::u4, 32"
                  "f16, Code::u4, 64" "f16, Code::u4, 128" "f16, Code::e2m1, 32" "f16, Code::s8, 32"
                  "f16, Code::s8, 64" "f16, Code::s8, 128")
radix_instantiate(linear mixed_wgmma "void mixed_wgmma<@>(const Problem&)"
                  VARIANTS "bf16, Code::u4, 32" "bf16, Code::u4, 64" "bf16, Code::u4, 128" "bf16, Code::e2m1, 32"
                  "bf16, Code::s8, 32" "bf16, Code::s8, 64" "bf16, Code::s8, 128" "f16, Code::u4, 32"
                  "f16, Code::u4, 64" "f16, Code::u4, 128" "f16, Code::e2m1, 32" "f16, Code::s8, 32"
                  "f16, Code::s8, 64" "f16, Code::s8, 128")
