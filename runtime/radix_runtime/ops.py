"""The one door to the kernel wheel. Nothing else in the runtime imports radix_kernels."""

import logging
import re
from collections.abc import Collection
from importlib.util import find_spec

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
    DecoderLayer,
    DenseDecoder,
    GpuCommunicator,
    LogitEdits,
    PackedExperts,
    PackedWeight,
    ShmCommunicator,
    capabilities,
    count_tokens_inplace,
    embedding,
    flash_attn_with_kvcache,
    fused_experts,
    fused_experts_packed,
    fused_qk_norm_rope_store,
    gelu_and_mul,
    gelu_tanh_and_mul,
    get_num_threads,
    layernorm,
    linear,
    linear_argmax,
    linear_silu_and_mul,
    moe_fused_gate,
    pack_weight,
    rmsnorm,
    rope_cos_sin_cache,
    set_num_threads,
    silu_and_mul,
    token_logprobs,
    top_k_top_p_sampling,
    top_k_top_p_sampling_with_logprobs,
    topk_sigmoid,
    topk_softmax,
)

# Ops that few models need; a layer that does says so (Layer.special_ops).
_SPECIAL = {
    "fused_experts",
    "fused_experts_packed",
    "layernorm",
    "moe_fused_gate",
    "topk_sigmoid",
    "topk_softmax",
}


def has_native(op: str, dtype: str, device_kind: str) -> bool:
    """Whether the wheel has its own kernel of `op` for tensors of `dtype` (float32, bfloat16, ...)
    on cpu, cuda or rocm."""
    impl = capabilities()["ops"].get(op, {}).get(dtype, {}).get("impl", "reference")
    return impl.split(":")[0] == device_kind


def use_native(special: Collection[str] = (), *, quiet: bool = False) -> None:
    """From now on an op without a kernel is an error. A source tree whose library lacks one of the
    ops that every model needs, or of the `special` ones, keeps the reference. Warns, unless
    `quiet`, of the portable instruction set."""
    found = capabilities()
    needed = set(globals()) - _SPECIAL | set(special)
    used = [dtypes for op, dtypes in found["ops"].items() if op in needed]
    impls = [entry["impl"] for dtypes in used for entry in dtypes.values()]
    is_complete = found["backend"] is not None and "reference" not in impls
    radix_kernels.set_fallback("error" if is_complete else "warn")
    if found["isa"] == "portable" and not quiet:
        logging.getLogger(__name__).warning(PORTABLE)


def has_triton() -> bool:
    """Whether Triton is installed (it is not imported here)."""
    return find_spec("triton") is not None
