"""The one door to the kernel wheel. Nothing else in the runtime imports radix_kernels."""

import logging
import re
from types import ModuleType

from .errors import ConfigError

WHEEL_FLOOR = (0, 1)  # the first version of the kernel wheel that this runtime works with
WHEEL_CEILING = (0, 2)  # and the first one that it does not
_RANGE = ">={}.{},<{}.{}".format(*WHEEL_FLOOR, *WHEEL_CEILING)
PORTABLE = "CPU kernels run at the portable level, the slowest: the CPU has no AVX2, or RADIX_CPU_ISA asks for it"
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
            f"the installed radix-kernels wheel is {version}, this runtime needs {_RANGE}; run: {_PIP}"
        )


check_version(radix_kernels.__version__)

# The ops that the runtime uses.
from radix_kernels import (
    DenseDecoder, GpuCommunicator, LogitEdits, PackedWeight, ShmCommunicator, capabilities,
    count_tokens_inplace, embedding, flash_attn_with_kvcache, fused_add_rmsnorm, fused_qk_norm_rope_store, gelu_and_mul,
    gelu_tanh_and_mul, get_num_threads, linear, linear_argmax, linear_silu_and_mul, pack_weight, rmsnorm,
    rope_cos_sin_cache, set_num_threads, silu_and_mul, token_logprobs, top_k_top_p_sampling,
    top_k_top_p_sampling_with_logprobs,
)  # fmt: skip


def has_native(op: str, dtype: str, device_kind: str) -> bool:
    """Whether the wheel has its own kernel of `op` for tensors of `dtype` on cpu, cuda or rocm."""
    impl = capabilities()["ops"].get(op, {}).get(dtype, {}).get("impl", "reference")
    return impl.split(":")[0] == device_kind


def use_native(*, quiet: bool = False) -> None:
    """From now on an op without a kernel is an error. A source tree without the whole library keeps
    the reference."""
    found = capabilities()
    used = (
        entry for op, dtypes in found["ops"].items() if op in globals() for entry in dtypes.values()
    )
    complete = found["backend"] is not None and all(entry["impl"] != "reference" for entry in used)
    radix_kernels.set_fallback("error" if complete else "warn")
    if found["isa"] == "portable" and not quiet:
        logging.getLogger(__name__).warning(PORTABLE)


def triton_kernels() -> ModuleType | None:
    """`radix_kernels.triton`, or None where Triton is not installed."""
    try:
        import radix_kernels.triton as kernels
    except ImportError:
        return None
    return kernels
