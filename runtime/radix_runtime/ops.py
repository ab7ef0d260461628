"""The one door to the kernel wheel. Nothing else in the runtime imports radix_kernels."""

import logging
import re
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

from .errors import ConfigError

WHEEL_FLOOR = (0, 1)  # the first version of the kernel wheel that this runtime works with
WHEEL_CEILING = (0, 2)  # and the first one that it does not
PORTABLE = (
    "CPU kernels run at the portable level, the slowest: "
    "the CPU has no AVX2, or RADIX_CPU_ISA asks for it"
)
_RANGE = ">={}.{},<{}.{}".format(*WHEEL_FLOOR, *WHEEL_CEILING)
_PIP = f"pip install 'radix-kernels-cpu{_RANGE}' (or -cuda, -rocm)"

try:
    import radix_kernels
except ModuleNotFoundError as error:
    if error.name != "radix_kernels":
        raise
    raise ConfigError(f"the radix-kernels wheel is not installed; run: {_PIP}") from None
except ImportError as error:  # the wheel says itself why it cannot work here
    raise ConfigError(str(error)) from None


def check_version(version: str) -> None:
    """Raises ConfigError when a kernel wheel of this version cannot serve this runtime."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    if not WHEEL_FLOOR <= found < WHEEL_CEILING:
        raise ConfigError(
            f"the installed radix-kernels wheel is {version}, this runtime needs {_RANGE}; "
            f"run: {_PIP}"
        )


check_version(radix_kernels.__version__)

# The ops that the runtime uses.
from radix_kernels import (
    ClampedSwiGlu,
    Decoder,
    GpuCommunicator,
    LogitEdits,
    PackedExperts,
    PackedHeads,
    PackedWeight,
    PersistentDecoder,
    PersistentLayer,
    ShmCommunicator,
    accept_tokens,
    apply_rope_inplace,
    concat_mla_k,
    count_tokens_inplace,
    dequantize_gguf,
    embedding,
    fill_step_tensors,
    flash_attn_varlen,
    flash_attn_with_kvcache,
    fp8_format,
    fused_experts,
    fused_experts_packed,
    fp8_blockwise_scaled_mm,
    fp8_scaled_mm,
    fused_add_rmsnorm,
    fused_qk_norm_rope_store,
    gather_mla_kv,
    gelu_and_mul,
    gelu_tanh_and_mul,
    get_num_threads,
    int8_scaled_mm,
    layernorm,
    linear,
    linear_argmax,
    linear_heads,
    linear_silu_and_mul,
    merge_state,
    mla_decode,
    moe_fused_gate,
    native_fp8,
    pack_merged,
    pack_weight,
    per_tensor_quant_fp8,
    per_token_group_quant,
    per_token_quant_fp8,
    per_token_quant_int8,
    rmsnorm,
    rmsnorm_quant_fp8,
    rmsnorm_quant_int8,
    rope_cos_sin_cache,
    sample_candidates,
    sampling_candidates,
    set_num_threads,
    silu_and_mul,
    silu_and_mul_quant_fp8,
    silu_and_mul_quant_int8,
    store_mla_kv,
    token_logprobs,
    top_k_top_p_sampling,
    top_k_top_p_sampling_with_logprobs,
    topk_sigmoid,
    topk_softmax,
    unpack_awq,
    unpack_gguf,
    unpack_gptq,
    unpack_weight,
    weight_kernel,
)

# The records of a `Decoder`.
from radix_kernels.decoder import (
    AddOp,
    AttentionOp,
    Columns,
    DecoderOp,
    ExpertsOp,
    GatedActivationOp,
    LatentAttentionOp,
    LatentPrefillOp,
    LatentStoreOp,
    LayerCache,
    LinearOp,
    NormOp,
    RopeStoreOp,
    RouteOp,
    ScaleOp,
)

# What `fused_experts` calls an activation: its name or its record.
from radix_kernels.gating import Activation

# What `unpack_gptq` and `unpack_awq` give, and `unpack_gguf`.
from radix_kernels.formats import PackArguments
from radix_kernels.gguf_blocks import GgufArguments

# Ops that few models need; a layer that does says so (Layer.special_ops).
_SPECIAL = {
    "fp8_blockwise_scaled_mm",
    "fp8_scaled_mm",
    "apply_rope_inplace",
    "concat_mla_k",
    "flash_attn_varlen",
    "fused_experts",
    "fused_experts_packed",
    "gather_mla_kv",
    "int8_scaled_mm",
    "layernorm",
    "linear_heads",
    "merge_state",
    "mla_decode",
    "moe_fused_gate",
    "per_tensor_quant_fp8",
    "per_token_group_quant",
    "per_token_quant_fp8",
    "per_token_quant_int8",
    "rmsnorm_quant_fp8",
    "rmsnorm_quant_int8",
    "sample_candidates",
    "sampling_candidates",
    "silu_and_mul_quant_fp8",
    "silu_and_mul_quant_int8",
    "store_mla_kv",
    "topk_sigmoid",
    "topk_softmax",
}


def capabilities() -> dict[str, Any]:
    """What the wheel says of itself. Raises ConfigError where the instruction set that it was told
    to use is none, or not this machine's."""
    try:
        found: dict[str, Any] = radix_kernels.capabilities()
    except (ValueError, NotImplementedError) as error:
        if "RADIX_CPU_ISA" not in str(error):
            raise
        raise ConfigError(f"{error}; name another level, or unset RADIX_CPU_ISA") from None
    return found


def has_native(op: str, dtype: str, device_kind: str) -> bool:
    """Whether the wheel has its own kernel of `op` for tensors of `dtype` (float32, bfloat16, ...)
    on cpu, cuda or rocm."""
    impl = capabilities()["ops"].get(op, {}).get(dtype, {}).get("impl", "reference")
    return impl.split(":")[0] == device_kind


def check_device(kind: str) -> None:
    """Raises ConfigError when the installed kernels are not for `kind`: cpu, cuda or rocm. A source
    tree without a library runs the reference anywhere."""
    backend = capabilities()["backend"]
    if backend in (None, kind):
        return
    wheel = f"radix-kernels-{backend}"
    other = f"install radix-kernels-{kind} in its place (pip uninstall -y {wheel} first)"
    if kind == "cpu":
        raise ConfigError(
            f"the installed kernels ({wheel}) need a GPU, and the model would run on the CPU: "
            f"torch sees no GPU, or --device cpu asks for it; make the GPU visible to torch "
            f"(driver, CUDA_VISIBLE_DEVICES, a torch built for it), or {other}"
        )
    raise ConfigError(
        f"the installed kernels ({wheel}) are not for this GPU's {kind}; {other}"
        + (", or serve with --device cpu" if backend == "cpu" else "")
    )


def use_native(special: Collection[str], dtype: str, *, quiet: bool = False) -> None:
    """From now on an op without a kernel is an error, for a model that computes in `dtype` and
    needs the `special` ops beside those that every model needs. Where one of them has no kernel
    here, its reference runs, and a warning names it. Warns of the portable instruction set too;
    `quiet`: neither."""
    logger = logging.getLogger(__name__)
    found = capabilities()
    needed = set(globals()) - _SPECIAL | set(special)
    slow = sorted(
        op for op, dtypes in found["ops"].items() if op in needed and _is_reference(dtypes, dtype)
    )
    is_complete = found["backend"] is not None and not slow
    radix_kernels.set_fallback("error" if is_complete else "warn")
    if quiet:
        return
    if slow and found["backend"] is not None:
        logger.warning("slow: no kernel for %s in %s here", ", ".join(slow), dtype)
    if found["isa"] == "portable":
        logger.warning(PORTABLE)


def _is_reference(dtypes: Mapping[str, Mapping[str, str]], dtype: str) -> bool:
    """Whether the reference runs an op for a model of that dtype. `dtypes`: what runs the op, by
    dtype; one that has none of the model's (FP8, say) is needed in all of its own."""
    used = [dtypes[dtype]] if dtype in dtypes else dtypes.values()
    return any(entry["impl"] == "reference" for entry in used)


def has_triton() -> bool:
    """Whether Triton is installed (it is not imported here)."""
    return find_spec("triton") is not None
