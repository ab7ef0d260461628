radix_sm90_family(linear linear.cu pack.cu rows.cu)
radix_instantiate(linear mixed_mma "void mixed_mma<@>(const Problem&)"
                  VARIANTS "bf16, Code::u4" "f16, Code::u4" "bf16, Code::e2m1" "f16, Code::e2m1" "bf16, Code::s8"
                  "f16, Code::s8")
