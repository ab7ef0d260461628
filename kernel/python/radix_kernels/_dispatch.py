"""Which implementation runs an op: native, Triton, or the reference.

An op's native function is the attribute of that name in the binding; ops light up as the binding
gains them. The choice is made once for each (op, device type) and cached. Without a native kernel
the reference runs, after one warning, or `RuntimeError` is raised (`set_fallback`).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

from . import _loader
from ._arrays import Array, device_type

Native = Callable[..., Any]

_MODES = ("reference", "warn", "error")
_SERVES = {"cpu": ("cpu",), "cuda": ("cuda",), "rocm": ("cuda", "rocm")}
_GPUS = ("cuda", "rocm")
_TRITON_OPS = frozenset(
    {
        "bmm_fp8",
        "flash_attn_varlen",
        "flash_attn_with_kvcache",
        "fp8_blockwise_scaled_mm",
        "fp8_scaled_mm",
        "fused_experts",
        "m_grouped_gemm_contiguous",
        "m_grouped_gemm_masked",
        "mla_decode",
        "top_k_top_p_sampling",
    }
)
# In the CUDA library these are compiled for Hopper alone.
_HOPPER_OPS = frozenset(
    {
        "flash_attn_with_kvcache",
        "flash_attn_varlen",
        "mla_decode",
        "fused_experts",
        "m_grouped_gemm_contiguous",
        "m_grouped_gemm_masked",
        "linear_dense",
        "fp8_scaled_mm",
        "fp8_blockwise_scaled_mm",
        "bmm_fp8",
    }
)
# And these refuse float32 there.
_HOPPER_HALVES = frozenset(
    {
        "flash_attn_with_kvcache",
        "flash_attn_varlen",
        "fused_experts",
        "m_grouped_gemm_contiguous",
        "m_grouped_gemm_masked",
        "linear_dense",
    }
)
# Dense products on a GPU belong to the vendor's BLAS: there torch is the choice, not a fallback.
_TORCH_OPS = frozenset(
    {"linear_dense", "linear_argmax", "pack_weight", "linear_packed", "embedding_packed"}
)

_mode = "warn"
_warned: set[str] = set()
_cache: dict[tuple[str, str], Native | None] = {}


def set_fallback(mode: str) -> None:
    """Say what happens where no kernel exists for an op and device.

    `reference`: run the reference silently; `warn` (the default): the same after one warning;
    `error`: raise RuntimeError. ValueError for any other mode.
    """
    global _mode
    if mode not in _MODES:
        raise ValueError(f"set_fallback: mode is {mode!r}, expected one of {', '.join(_MODES)}")
    _mode = mode
    _cache.clear()


def get_fallback() -> str:
    """The mode given to `set_fallback`."""
    return _mode


def native(op: str, x: Array) -> Native | None:
    """The kernel for op on x's device; None: the caller runs the reference.

    RuntimeError when there is none and the mode is `error`; TypeError when x is no tensor.
    """
    try:
        key = (op, x.device.type)
    except AttributeError:
        key = (op, device_type(x))
    try:
        return _cache[key]
    except KeyError:
        return _choose(*key)


def fallback(op: str, x: Array, refused: Native, why: str) -> Native | None:
    """What runs a call that the kernel `refused` does not serve: Triton's kernel, or None for the
    reference.

    RuntimeError when only the reference is left and the mode is `error`.
    """
    device = device_type(x)
    if _has_triton(op, device):
        triton: Native = getattr(importlib.import_module("radix_kernels.triton"), op)
        if triton is not refused:
            return triton
    _report(op, device, why)
    return None


def implementation(op: str, name: str) -> Native:
    """The kernel of op that a caller asks for by name; `triton` is the only one.

    ValueError for another name, RuntimeError where Triton is not installed.
    """
    if name != "triton" or op not in _TRITON_OPS:
        raise ValueError(f"{op}: implementation is {name!r}, expected 'auto' or 'triton'")
    if not triton_installed():
        raise RuntimeError(f"{op}: Triton is not installed")
    kernel: Native = getattr(importlib.import_module("radix_kernels.triton"), op)
    return kernel


def attempt(op: str, x: Array, call: Callable[[Native, bool], None]) -> bool:
    """Calls `call(run, bound)` with the native kernel or, where there is none or it refuses, with
    Triton's.

    bound: run is the library's own, so it may need a workspace. False: the caller runs the
    reference.
    """
    run = native(op, x)
    while run is not None:
        try:
            call(run, run is getattr(_loader.bind, op, None))
            return True
        except NotImplementedError as refusal:
            run = fallback(op, x, run, str(refusal))
    return False


def describe(op: str, device: str, dtype: str = "bfloat16") -> tuple[str, str]:
    """(implementation, why) for op on a device type and dtype, in the words of `capabilities()`."""
    if _native(op, device) is not None and not _refuses(op, dtype):
        return f"{_loader.backend}:{isa()}" if isa() else str(_loader.backend), "native kernel"
    if _has_triton(op, device):
        return "triton", f"{_why_not_native(op, device, dtype)}; Triton is installed"
    if op in _TORCH_OPS and device in _GPUS:
        return "torch", "dense products on a GPU are the vendor's BLAS"
    return "reference", _why_not_native(op, device, dtype)


def isa() -> str:
    """The instruction set level or architecture that native kernels use here; '' without any."""
    level = getattr(_loader.bind, "isa", None)
    return str(level() if callable(level) else level) if level is not None else ""


def triton_installed() -> bool:
    """True when the triton package can be imported (it is not imported here)."""
    return importlib.util.find_spec("triton") is not None


def _native(op: str, device: str) -> Native | None:
    if _loader.bind is None or device not in _SERVES.get(str(_loader.backend), ()):
        return None
    if _hopper_only(op) and isa() != "sm_90":
        return None
    if _foreign_chip():
        return None
    found: Native | None = getattr(_loader.bind, op, None)
    return found


def _foreign_chip() -> bool:
    """True on a GPU that the ROCm library has no code for. Without a GPU nothing is known."""
    if _loader.backend != "rocm" or not _loader.targets:
        return False
    chip = isa()
    return chip.startswith("gfx") and chip != "gfx" and chip not in _loader.targets


def _hopper_only(op: str) -> bool:
    return op in _HOPPER_OPS and _loader.backend == "cuda"


def _refuses(op: str, dtype: str) -> bool:
    """True where the library has the op, but not for this dtype."""
    return dtype == "float32" and op in _HOPPER_HALVES and _hopper_only(op)


def _has_triton(op: str, device: str) -> bool:
    return op in _TRITON_OPS and device in _GPUS and triton_installed()


def _why_not_native(op: str, device: str, dtype: str = "bfloat16") -> str:
    if _loader.bind is None:
        return _loader.reason
    if device not in _SERVES.get(str(_loader.backend), ()):
        return f"the {_loader.backend} kernels do not serve {device} tensors"
    if _foreign_chip():
        known = " and ".join(_loader.targets)
        return f"the rocm library has code for {known}, this GPU is {isa()}"
    if _native(op, device) is not None and _refuses(op, dtype):
        return f"the {_loader.backend} library has no {dtype} {op}"
    if _hopper_only(op) and hasattr(_loader.bind, op):
        return f"the {_loader.backend} library has {op} for sm_90 only"
    return f"the {_loader.backend} library has no {op}"


def _choose(op: str, device: str) -> Native | None:
    found = _native(op, device)
    if found is None and _has_triton(op, device):
        found = getattr(importlib.import_module("radix_kernels.triton"), op)
    if found is None and not (op in _TORCH_OPS and device in _GPUS):
        _report(op, device, _why_not_native(op, device))
    _cache[op, device] = found
    return found


def _report(op: str, device: str, why: str) -> None:
    if _mode == "error":
        raise RuntimeError(f"{op} on {device}: no kernel ({why}) and set_fallback is 'error'")
    # One warning for a missing library, not one for each of its ops.
    text = f"radix_kernels runs its reference: {why}"
    if _mode == "warn" and text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)
