radix_sm90_family(experts experts.cu grouped_persistent_experts.cu grouped_persistent_fp8.cu grouped_persistent_tiles.cu
                  m_grouped_gemm.cu mixed_experts.cu order.cu)
radix_instantiate(experts grouped_mma_m16
                  "void grouped_mma_m16<@, @>(const Problem&)" "void grouped_mma_m16<@, e4m3>(const Problem&)"
                  VARIANTS bf16 f16)
set(_grouped_swap_ab "void grouped_swap_ab<@>(const Problem&, const Scratch&)")
radix_instantiate(experts grouped_swap_ab ${_grouped_swap_ab}
                  VARIANTS "bf16, Format::widened" "f16, Format::widened" "f16, Format::fp8")
radix_instantiate(experts m_grouped_gemm ${_grouped_swap_ab} "void grouped_gemm<@>(const Grouped&)"
                  VARIANTS "bf16, Format::half" "f16, Format::half" "bf16, Format::fp8")
foreach(_mixed grouped_mixed grouped_mixed_mma)
  radix_instantiate(experts ${_mixed} "void ${_mixed}<@>(const MixedProblem&, const Scratch&)"
                    VARIANTS "bf16, linear::Code::u4, 32" "bf16, linear::Code::u4, 64" "bf16, linear::Code::u4, 128"
                    "bf16, linear::Code::e2m1, 32" "bf16, linear::Code::s8, 128" "f16, linear::Code::u4, 32"
                    "f16, linear::Code::u4, 64" "f16, linear::Code::u4, 128" "f16, linear::Code::e2m1, 32"
                    "f16, linear::Code::s8, 128")
endforeach()
