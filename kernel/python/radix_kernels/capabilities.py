"""What runs here, op by op."""

from __future__ import annotations

import platform
from typing import Any

from . import _dispatch, _loader
from ._ops import OPS, OpSpec

_NO_GPU = ("no device", "no HIP runtime")  # what a GPU library says instead of an architecture


def capabilities() -> dict[str, Any]:
    """The implementation of each op and dtype on this installation, and why.

    Keys: `backend` (cpu, cuda, rocm, or None without a native library), `version`, `abi_version`,
    `isa`, `devices` (device types the native library serves here), `python`, and `ops`: op ->
    dtype -> {`impl`: `cpu:avx512` | `triton` | `reference` ..., `why`}. An op is described for the
    backend's device; without a backend, for the CPU. The dtype of attention and of `store_kv_cache`
    is that of the cache (queries then have it too, or are 16-bit for FP8, any float for INT8).
    """
    device = _loader.backend if _loader.backend in ("cuda", "rocm") else "cpu"
    return {
        "backend": _loader.backend,
        "version": _loader.version,
        "abi_version": _loader.abi_version,
        "isa": _dispatch.isa(),
        "devices": _devices(),
        "python": platform.python_version(),
        "ops": {op.name: _by_dtype(op, device) for op in OPS},
    }


def _by_dtype(op: OpSpec, device: str) -> dict[str, dict[str, str]]:
    kernel = op.kernel(device)
    found = {}
    for dtype in op.dtypes + op.more_dtypes.get(device, ()):
        impl, why = _dispatch.describe(kernel.name, device, dtype)
        if op.note and device != "cpu" and why == "native kernel":
            why = op.note
        found[dtype] = {"impl": impl, "why": why}
    return found


def _devices() -> list[str]:
    """The device type of the library's backend; none without a library, or without a GPU that it
    could run on."""
    if _loader.backend is None or _dispatch.isa() in _NO_GPU:
        return []
    return [_loader.backend]
