"""The table of ops: the one place where an op is registered.

Everything that lists ops follows from it: which implementation runs (`_dispatch`), what
`capabilities()` says, the exports of the package and its stub, the check of the binding's stub, and
the map of ops in docs/kernels/README.md. This module imports nothing of the package but what an
entry is (`_op_spec`).
"""

from __future__ import annotations

from ._op_spec import Kernel, Library, OpSpec

FLOATS = ("bfloat16", "float16", "float32")
HALVES = ("bfloat16", "float16")
FP8 = ("float8_e4m3fn",)
FNUZ = ("float8_e4m3fnuz",)  # AMD's form on gfx942


_CPU = Library("cpu")
_CUDA = Library("cuda")
_ROCM = Library("rocm")
_HOPPER = Library("cuda", archs=("sm_90",))
_HOPPER_NO_FLOAT32 = Library("cuda", archs=("sm_90",), refuses=("float32",))
_AMPERE_AND_ADA = Library("cuda", archs=("sm_80", "sm_86", "sm_87", "sm_89"))
_ADA = Library("cuda", archs=("sm_89",))
_BLACKWELL = Library("cuda", archs=("sm_100",))

_EVERYWHERE = (_CPU, _CUDA, _ROCM)
_GPUS = (_CUDA, _ROCM)

_PACKED = (_CPU, _HOPPER_NO_FLOAT32)
_LINEAR_PACKED = Kernel(name="linear_packed", family="linear", libraries=_PACKED, torch=True)
# Triton's alone: weights of codes on GPUs without a kernel of the library for them.
_LINEAR_CODES = Kernel(name="linear_codes", family="linear", libraries=(), triton=True)
_LINEAR_DENSE = Kernel(
    name="linear_dense", family="gemm", libraries=(_HOPPER_NO_FLOAT32,), torch=True
)
_QUANT_ROWS = Kernel(name="per_token_quant_fp8", family="quantize", libraries=_GPUS)
_QUANT_ROWS_INT8 = Kernel(name="per_token_quant_int8", family="quantize", libraries=_GPUS)
_SAMPLING = Kernel(
    name="top_k_top_p_sampling", family="sampling", libraries=_EVERYWHERE, triton=True
)

# Called through the dispatch by functions that are no ops themselves.
PACKING = (
    Kernel(name="pack_weight", family="linear", libraries=_PACKED, torch=True),
    Kernel(name="unpack_weight", family="linear", libraries=_PACKED),
)

# fmt: off
OPS = (
    OpSpec(
        name="rmsnorm", module="norm", dtypes=FLOATS,
        kernels=(Kernel(name="rmsnorm", family="norm", libraries=_EVERYWHERE),),
        doc="pointwise.md", test="test_norm.py", bench="pointwise",
    ),
    OpSpec(
        name="fused_add_rmsnorm", module="norm", dtypes=FLOATS,
        kernels=(Kernel(name="fused_add_rmsnorm", family="norm", libraries=_EVERYWHERE),),
        doc="pointwise.md", test="test_norm.py", bench="pointwise",
    ),
    OpSpec(
        name="layernorm", module="norm", dtypes=FLOATS,
        kernels=(Kernel(name="layernorm", family="layernorm", libraries=(_CPU,)),),
        doc="pointwise.md", test="test_layernorm.py", bench="pointwise",
    ),
    OpSpec(
        name="apply_rope_inplace", module="rope", dtypes=FLOATS,
        kernels=(Kernel(name="apply_rope_inplace", family="rope", libraries=_EVERYWHERE),),
        doc="pointwise.md", test="test_rope.py", bench="pointwise",
    ),
    OpSpec(
        name="fused_qk_norm_rope_store", module="fused_rope", dtypes=FLOATS,
        kernels=(
            Kernel(name="fused_qk_norm_rope_store", family="fused_rope", libraries=_EVERYWHERE),
        ),
        doc="pointwise.md", test="test_fused_rope.py", bench="pointwise",
    ),
    OpSpec(
        name="silu_and_mul", module="activation", dtypes=FLOATS,
        kernels=(Kernel(name="silu_and_mul", family="activation", libraries=_EVERYWHERE),),
        doc="pointwise.md", test="test_activation.py", bench="pointwise",
    ),
    OpSpec(
        name="gelu_and_mul", module="activation", dtypes=FLOATS,
        kernels=(Kernel(name="gelu_and_mul", family="activation", libraries=_EVERYWHERE),),
        doc="pointwise.md", test="test_activation.py",
    ),
    OpSpec(
        name="gelu_tanh_and_mul", module="activation", dtypes=FLOATS,
        kernels=(Kernel(name="gelu_tanh_and_mul", family="activation", libraries=_EVERYWHERE),),
        doc="pointwise.md", test="test_activation.py",
    ),
    OpSpec(
        name="store_kv_cache", module="kv_cache", dtypes=FLOATS,
        more_dtypes={"cpu": ("int8",), "cuda": FP8, "rocm": FP8 + FNUZ},
        kernels=(Kernel(name="store_kv_cache", family="kv_cache", libraries=_EVERYWHERE),),
        doc="pointwise.md", test="test_kv_cache.py", bench="pointwise",
    ),
    OpSpec(
        name="flash_attn_with_kvcache", module="attention", dtypes=FLOATS,
        more_dtypes={"cpu": ("int8",), "cuda": FP8, "rocm": FP8 + FNUZ},
        kernels=(
            Kernel(
                name="flash_attn_with_kvcache", family="attention",
                libraries=(_CPU, _HOPPER_NO_FLOAT32), triton=True,
            ),
        ),
        doc="attention.md", test="test_attention.py", bench="attention",
    ),
    OpSpec(
        name="flash_attn_varlen", module="attention", dtypes=FLOATS,
        more_dtypes={"cuda": FP8, "rocm": FP8 + FNUZ},
        kernels=(
            Kernel(
                name="flash_attn_varlen", family="attention",
                libraries=(_CPU, _HOPPER_NO_FLOAT32), triton=True,
            ),
        ),
        doc="attention.md", test="test_attention_prefill.py", bench="attention",
    ),
    OpSpec(
        name="merge_state", module="attention", dtypes=FLOATS,
        kernels=(Kernel(name="merge_state", family="merge_state", libraries=_EVERYWHERE),),
        doc="attention.md", test="test_attention.py",
    ),
    OpSpec(
        name="mla_decode", module="mla", dtypes=FLOATS,
        kernels=(
            Kernel(
                name="mla_decode", family="mla", libraries=(_CPU, _HOPPER_NO_FLOAT32), triton=True,
                triton_refuses=("float32",),
            ),
        ),
        note="native kernel for 512 latent values, else Triton's",
        doc="mla.md", test="test_mla.py", bench="mla",
    ),
    OpSpec(
        name="store_mla_kv", module="mla", dtypes=FLOATS,
        kernels=(Kernel(name="store_mla_kv", family="mla_kv", libraries=_EVERYWHERE),),
        doc="mla.md", test="test_mla.py", bench="mla",
    ),
    OpSpec(
        name="gather_mla_kv", module="mla", dtypes=FLOATS,
        kernels=(Kernel(name="gather_mla_kv", family="mla_kv", libraries=_EVERYWHERE),),
        doc="mla.md", test="test_mla_store.py", bench="mla",
    ),
    OpSpec(
        name="concat_mla_k", module="mla", dtypes=FLOATS,
        kernels=(Kernel(name="concat_mla_k", family="mla_kv", libraries=_EVERYWHERE),),
        doc="mla.md", test="test_mla.py", bench="mla",
    ),
    OpSpec(
        name="linear", module="linear", dtypes=FLOATS,
        kernels=(_LINEAR_CODES, _LINEAR_DENSE, _LINEAR_PACKED),
        note="native kernel up to 64 rows and with a residual, else the vendor's BLAS",
        doc="linear.md", test="test_linear.py", bench="linear",
    ),
    OpSpec(
        name="linear_argmax", module="linear", dtypes=FLOATS,
        kernels=(Kernel(name="linear_argmax", family="linear", libraries=(_CPU,), torch=True),),
        doc="linear.md", test="test_linear_argmax.py", bench="linear",
    ),
    OpSpec(
        name="linear_heads", module="packed_heads", dtypes=FLOATS,
        kernels=(Kernel(name="PackedHeads", family="packed_heads", libraries=(_CPU,)),),
        doc="linear.md", test="test_packed_heads.py",
    ),
    OpSpec(
        name="linear_silu_and_mul", module="gemm", dtypes=FLOATS,
        kernels=(_LINEAR_CODES, _LINEAR_DENSE, _LINEAR_PACKED),
        doc="gemm.md", test="test_gemm.py", bench="gemm",
    ),
    OpSpec(
        name="fp8_scaled_mm", module="gemm", dtypes=FP8, more_dtypes={"rocm": FNUZ},
        kernels=(
            Kernel(
                name="fp8_scaled_mm", family="gemm", libraries=(_HOPPER,), triton=True,
                elsewhere="fp8_scaled_mm_sm89",
            ),
            Kernel(
                name="fp8_scaled_mm_sm89", family="scaled_mm", libraries=(_ADA,),
                elsewhere="fp8_scaled_mm_sm100",
            ),
            Kernel(name="fp8_scaled_mm_sm100", family="scaled_mm", libraries=(_BLACKWELL,)),
        ),
        doc="gemm.md", test="test_gemm.py", bench="gemm",
    ),
    OpSpec(
        name="int8_scaled_mm", module="gemm", dtypes=("int8",),
        kernels=(
            Kernel(
                name="int8_scaled_mm", family="gemm", libraries=(_HOPPER,), triton=True,
                elsewhere="int8_scaled_mm_sm80",
            ),
            Kernel(name="int8_scaled_mm_sm80", family="scaled_mm", libraries=(_AMPERE_AND_ADA,)),
        ),
        doc="gemm.md", test="test_gemm_int8.py", bench="gemm",
    ),
    OpSpec(
        name="fp8_blockwise_scaled_mm", module="gemm", dtypes=FP8, more_dtypes={"rocm": FNUZ},
        kernels=(
            Kernel(
                name="fp8_blockwise_scaled_mm", family="gemm", libraries=(_HOPPER,), triton=True
            ),
        ),
        doc="gemm.md", test="test_gemm.py", bench="gemm",
    ),
    OpSpec(
        name="bmm_fp8", module="gemm", dtypes=FP8, more_dtypes={"rocm": FNUZ},
        kernels=(Kernel(name="bmm_fp8", family="gemm", libraries=(_HOPPER,), triton=True),),
        doc="gemm.md", test="test_gemm.py",
    ),
    OpSpec(
        name="per_tensor_quant_fp8", module="quantize", dtypes=FLOATS,
        kernels=(Kernel(name="per_tensor_quant_fp8", family="quantize", libraries=_GPUS),),
        doc="gemm.md", test="test_quantize.py",
    ),
    OpSpec(
        name="per_token_quant_fp8", module="quantize", dtypes=FLOATS,
        kernels=(_QUANT_ROWS,),
        doc="gemm.md", test="test_quantize.py", bench="quantize",
    ),
    OpSpec(
        name="per_token_group_quant", module="quantize", dtypes=FLOATS,
        kernels=(_QUANT_ROWS,),
        doc="gemm.md", test="test_quantize.py",
    ),
    OpSpec(
        name="silu_and_mul_quant_fp8", module="quantize", dtypes=FLOATS,
        kernels=(_QUANT_ROWS,),
        doc="gemm.md", test="test_quantize.py", bench="quantize",
    ),
    OpSpec(
        name="rmsnorm_quant_fp8", module="quantize", dtypes=FLOATS,
        kernels=(Kernel(name="rmsnorm_quant_fp8", family="quantize", libraries=_GPUS),),
        doc="gemm.md", test="test_quantize.py", bench="quantize",
    ),
    OpSpec(
        name="per_token_quant_int8", module="quantize_int8", dtypes=FLOATS,
        kernels=(_QUANT_ROWS_INT8,),
        doc="gemm.md", test="test_quantize_int8.py", bench="quantize",
    ),
    OpSpec(
        name="silu_and_mul_quant_int8", module="quantize_int8", dtypes=FLOATS,
        kernels=(_QUANT_ROWS_INT8,),
        doc="gemm.md", test="test_quantize_int8.py", bench="quantize",
    ),
    OpSpec(
        name="rmsnorm_quant_int8", module="quantize_int8", dtypes=FLOATS,
        kernels=(Kernel(name="rmsnorm_quant_int8", family="quantize", libraries=_GPUS),),
        doc="gemm.md", test="test_quantize_int8.py", bench="quantize",
    ),
    OpSpec(
        name="embedding", module="linear", dtypes=FLOATS,
        kernels=(Kernel(name="embedding_packed", family="linear", libraries=_PACKED, torch=True),),
        note="native kernel for quantized weights, else torch",
        doc="linear.md", test="test_linear.py",
    ),
    OpSpec(
        name="topk_softmax", module="moe", dtypes=FLOATS,
        kernels=(Kernel(name="topk_softmax", family="moe", libraries=_EVERYWHERE),),
        doc="moe.md", test="test_moe.py", bench="moe",
    ),
    OpSpec(
        name="topk_sigmoid", module="moe", dtypes=FLOATS,
        kernels=(Kernel(name="topk_sigmoid", family="moe", libraries=_EVERYWHERE),),
        doc="moe.md", test="test_moe.py",
    ),
    OpSpec(
        name="moe_fused_gate", module="moe", dtypes=FLOATS,
        kernels=(Kernel(name="moe_fused_gate", family="moe", libraries=_EVERYWHERE),),
        doc="moe.md", test="test_moe.py",
    ),
    OpSpec(
        name="moe_align_block_size", module="moe", dtypes=("int32",),
        kernels=(Kernel(name="moe_align_block_size", family="moe", libraries=_EVERYWHERE),),
        doc="moe.md", test="test_moe.py", bench="moe",
    ),
    OpSpec(
        name="moe_sum", module="moe", dtypes=FLOATS,
        kernels=(Kernel(name="moe_sum", family="moe", libraries=_EVERYWHERE),),
        doc="moe.md", test="test_moe.py",
    ),
    OpSpec(
        name="fused_experts", module="moe", dtypes=FLOATS,
        kernels=(
            Kernel(
                name="fused_experts", family="experts", libraries=(_HOPPER_NO_FLOAT32,),
                triton=True,
            ),
        ),
        doc="moe.md", test="test_moe_experts.py", bench="moe",
    ),
    OpSpec(
        name="fused_experts_packed", module="packed_experts", dtypes=FLOATS,
        kernels=(
            Kernel(name="PackedExperts", family="packed_experts", libraries=(_CPU,)),
            Kernel(name="fused_experts_mixed", family="experts", libraries=(_HOPPER_NO_FLOAT32,)),
            Kernel(
                name="fused_experts_codes", family="packed_experts", libraries=(), triton=True
            ),
        ),
        note="native kernel for int4, int8 and mxfp4, else Triton",
        doc="moe.md", test="test_packed_experts.py", bench="packed_experts",
    ),
    OpSpec(
        name="m_grouped_gemm_contiguous", module="grouped_gemm", dtypes=FLOATS + FP8,
        more_dtypes={"rocm": FNUZ},
        kernels=(
            Kernel(
                name="m_grouped_gemm_contiguous", family="experts",
                libraries=(_HOPPER_NO_FLOAT32,), triton=True,
            ),
        ),
        doc="moe.md", test="test_grouped_gemm.py", bench="grouped",
    ),
    OpSpec(
        name="m_grouped_gemm_masked", module="grouped_gemm", dtypes=FLOATS + FP8,
        more_dtypes={"rocm": FNUZ},
        kernels=(
            Kernel(
                name="m_grouped_gemm_masked", family="experts",
                libraries=(_HOPPER_NO_FLOAT32,), triton=True,
            ),
        ),
        doc="moe.md", test="test_grouped_gemm.py", bench="grouped",
    ),
    OpSpec(
        name="apply_penalties_inplace", module="sampling", dtypes=("float32",),
        kernels=(
            Kernel(name="apply_penalties_inplace", family="sampling", libraries=_EVERYWHERE),
        ),
        doc="sampling.md", test="test_sampling_edits.py",
    ),
    OpSpec(
        name="count_tokens_inplace", module="sampling", dtypes=("int32",),
        kernels=(Kernel(name="count_tokens_inplace", family="sampling", libraries=_EVERYWHERE),),
        doc="sampling.md", test="test_sampling_edits.py",
    ),
    OpSpec(
        name="top_k_top_p_sampling", module="sampling", dtypes=("float32",),
        kernels=(_SAMPLING,),
        doc="sampling.md", test="test_sampling.py", bench="sampling",
    ),
    OpSpec(
        name="top_k_top_p_sampling_with_logprobs", module="sampling", dtypes=("float32",),
        kernels=(_SAMPLING,),
        doc="sampling.md", test="test_sampling_logprobs.py", bench="sampling",
    ),
    OpSpec(
        name="sampling_candidates", module="sampling_shards", dtypes=("float32",),
        kernels=(Kernel(name="sampling_candidates", family="sampling_shards", libraries=_GPUS),),
        doc="sampling.md", test="test_sampling_shards.py",
    ),
    OpSpec(
        name="sample_candidates", module="sampling_shards", dtypes=("int64",),
        kernels=(Kernel(name="sample_candidates", family="sampling_shards", libraries=_GPUS),),
        doc="sampling.md", test="test_sampling_shards.py",
    ),
    OpSpec(
        name="token_logprobs", module="sampling", dtypes=("float32",),
        kernels=(Kernel(name="token_logprobs", family="sampling", libraries=_EVERYWHERE),),
        doc="sampling.md", test="test_sampling_logprobs.py", bench="sampling",
    ),
    OpSpec(
        name="fill_step_tensors", module="step", dtypes=("int32",),
        kernels=(Kernel(name="fill_step_tensors", family="step", libraries=_EVERYWHERE),),
        doc="step.md", test="test_step.py", bench="step",
    ),
    OpSpec(
        name="accept_tokens", module="step", dtypes=("int32",),
        kernels=(Kernel(name="accept_tokens", family="step", libraries=_EVERYWHERE),),
        doc="step.md", test="test_step.py", bench="step",
    ),
)
# fmt: on

# By the name of the binding's function, which the dispatch goes by.
KERNELS = {kernel.name: kernel for kernel in PACKING} | {
    kernel.name: kernel for op in OPS for kernel in op.kernels
}
