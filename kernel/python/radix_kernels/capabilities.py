"""What runs here, op by op."""

from __future__ import annotations

import platform
from typing import Any

from . import _dispatch, _loader
from ._op_spec import OpSpec
from ._ops import FNUZ, FP8, OPS
from .codes_layout import GROUPS
from .fp8 import fp8_format
from .weight_kinds import KINDS

_FP8 = FP8 + FNUZ
# What a GPU library says instead of an architecture.
_NO_DEVICE = "no device"
_NO_RUNTIME = "no HIP runtime"


def capabilities() -> dict[str, Any]:
    """The implementation of each op and dtype on this installation, and why.

    Keys: `backend` (cpu, cuda, rocm, or None without a native library), `version`, `abi_version`,
    `isa`, `devices` (device types the native library serves here), `problem` (why it serves none:
    no library, no HIP runtime, no GPU, a GPU that it has no code for; '' where it does), `runtime`
    (the file of the HIP runtime that a ROCm library calls), `python`, and `ops`: op -> dtype ->
    {`impl`: `cpu:avx512` | `triton` | `reference` ..., `why`}. An op is described for the backend's
    device; without a backend, for the CPU. The dtype of attention and of `store_kv_cache`
    is that of the cache (queries then have it too, or are 16-bit for FP8, any float for INT8).
    `weights`: kind of `pack_weight` -> the same, of products with such weights (`weight_kernel`).
    """
    device = _loader.backend if _loader.backend in ("cuda", "rocm") else "cpu"
    problem = _problem()
    return {
        "backend": _loader.backend,
        "version": _loader.version,
        "abi_version": _loader.abi_version,
        "isa": _dispatch.isa(),
        "devices": [] if problem else [_loader.backend],
        "problem": problem,
        "runtime": _hip_runtime()[0],
        "python": platform.python_version(),
        "ops": {op.name: _by_dtype(op, device) for op in OPS},
        "weights": {kind: _by_kind(kind, device) for kind in KINDS},
    }


def weight_kernel(kind: str, device: str, dtype: str = "bfloat16") -> tuple[str, str]:
    """(implementation, why) of products with weights of a kind of `pack_weight` on a device type,
    for x of the dtype (its name), in the words of `capabilities()`; the implementation is `none`
    where `pack_weight` refuses the kind. Of the groups that a kind may have some are Triton's on
    every GPU. ValueError for a kind that there is not."""
    if kind not in KINDS:
        raise ValueError(f"weight_kernel: kind is {kind!r}, expected one of {', '.join(KINDS)}")
    if kind == "dense":
        name = "linear_dense" if device != "cpu" else "linear_packed"
        return _dispatch.describe(name, device, dtype)
    if device != "cpu" and kind in GROUPS:
        native = _dispatch.describe("linear_packed", device, dtype)
        is_native = native[1] == "native kernel"
        return native if is_native else _dispatch.describe("linear_codes", device, dtype)
    if device != "cpu":
        return "none", f"a GPU has {', '.join(GROUPS)}"
    impl, why = _dispatch.describe("linear_packed", device, dtype)
    return ("none", why) if impl == "reference" else (impl, why)


def _by_kind(kind: str, device: str) -> dict[str, str]:
    impl, why = weight_kernel(kind, device)
    return {"impl": impl, "why": why}


def _by_dtype(op: OpSpec, device: str) -> dict[str, dict[str, str]]:
    found = {}
    for dtype in op.dtypes + op.more_dtypes.get(device, ()):
        impl, why = _first_described(op, device, dtype)
        if impl.startswith("rocm:") and dtype in _FP8 and dtype != fp8_format():
            continue  # native kernels have the chip's format alone
        if op.note and device != "cpu" and why == "native kernel":
            why = op.note
        found[dtype] = {"impl": impl, "why": why}
    return found


def _first_described(op: OpSpec, device: str, dtype: str) -> tuple[str, str]:
    """The first of the op's kernels that runs there, or why that of the library does not."""
    kernels = (op.kernel(device), *op.kernels)
    found = [_dispatch.describe(kernel.name, device, dtype) for kernel in kernels]
    return next((each for each in found if each[0] != "reference"), found[0])


def _problem() -> str:
    """Why the native library serves no device here; '' where it serves its backend's."""
    if _loader.backend is None:
        return _loader.reason
    isa = _dispatch.isa()
    if isa == _NO_RUNTIME:
        return _hip_runtime()[1]
    if isa == _NO_DEVICE:
        return f"the {_loader.backend} library finds no GPU"
    return _dispatch.foreign_chip()


def _hip_runtime() -> tuple[str, str]:
    """(file, why there is none) of the HIP runtime; empty for libraries that call none."""
    if _loader.backend != "rocm" or _loader.bind is None:
        return "", ""
    found: tuple[str, str] = _loader.bind.hip_runtime()
    return found
