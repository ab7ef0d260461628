"""Which implementation runs an op: native, Triton, or the reference.

The table in `_ops` says what there is; the binding says what this build of the library has: an op
whose function it lacks runs something else. The choice is made once for each function of the
binding and device type and kept. Where neither a native kernel nor Triton's serves, the reference
runs, after one warning, or `RuntimeError` is raised (`set_fallback`).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

from . import _loader
from ._arrays import Array, device_type
from ._lazy import triton
from ._ops import KERNELS

Native = Callable[..., Any]

_MODES = ("reference", "warn", "error")
# The device types that a library of each backend serves: a ROCm torch calls its GPUs `cuda`.
_SERVES = {"cpu": ("cpu",), "cuda": ("cuda",), "rocm": ("cuda", "rocm")}
_GPUS = ("cuda", "rocm")

_mode = "warn"
_warned: set[str] = set()
# What was chosen, by device type and function of the binding.
_chosen: dict[str, dict[str, Native | None]] = {}
_on_cpu = _chosen["cpu"] = {}
_on_gpu = _chosen["cuda"] = {}


def set_fallback(mode: str) -> None:
    """Say what happens where no kernel exists for an op and device.

    `reference`: run the reference silently; `warn` (the default): the same after one warning;
    `error`: raise RuntimeError. ValueError for any other mode.
    """
    global _mode
    if mode not in _MODES:
        raise ValueError(f"set_fallback: mode is {mode!r}, expected one of {', '.join(_MODES)}")
    _mode = mode
    choose_anew()


def choose_anew() -> None:
    """Forgets what was chosen, as after a change of the library."""
    for by_op in _chosen.values():
        by_op.clear()


def get_fallback() -> str:
    """The mode given to `set_fallback`."""
    return _mode


def native(op: str, x: Array) -> Native | None:
    """The kernel for op, a function of the binding, on x's device; None: the caller runs the
    reference.

    RuntimeError when there is none and the mode is `error`; TypeError when x is no tensor.
    """
    # A torch tensor answers these two in a fifth of the time that `x.device.type` takes.
    try:
        if x.is_cuda:
            return _on_gpu[op]
        if x.is_cpu:
            return _on_cpu[op]
    except (AttributeError, KeyError):
        pass
    return _choose(op, _device_of(x))


def fallback(op: str, x: Array, refused: Native, why: str) -> Native | None:
    """What runs a call that the kernel `refused` does not serve: Triton's kernel, or None for the
    reference.

    RuntimeError when only the reference is left and the mode is `error`.
    """
    device = device_type(x)
    if _has_triton(op, device):
        portable: Native = getattr(triton, op)
        if portable is not refused:
            return portable
    _report(op, device, why)
    return None


def implementation(op: str, name: str) -> Native:
    """The kernel of op that a caller asks for by name; `triton` is the only one.

    ValueError for another name, RuntimeError where Triton is not installed.
    """
    if name != "triton" or not KERNELS[op].triton:
        raise ValueError(f"{op}: implementation is {name!r}, expected 'auto' or 'triton'")
    if not triton_installed():
        raise RuntimeError(f"{op}: Triton is not installed")
    kernel: Native = getattr(triton, op)
    return kernel


def attempt(op: str, x: Array, call: Callable[[Native, bool], None]) -> bool:
    """Calls `call(run, bound)` with the native kernel or, where there is none or it refuses the
    call (NotImplementedError), with Triton's.

    bound: run is the library's own, so it may need a workspace. Returns False where neither runs:
    the caller runs the reference.
    """
    run = native(op, x)
    while run is not None:
        try:
            call(run, _is_bound(op, run))
            return True
        except NotImplementedError as refusal:
            run = fallback(op, x, run, str(refusal))
    return False


def describe(op: str, device: str, dtype: str = "bfloat16") -> tuple[str, str]:
    """(implementation, why) for op, a function of the binding, on a device type and dtype, in the
    words of `capabilities()`."""
    if _native(op, device) is not None and not _refuses(op, dtype):
        architecture = isa()
        backend = str(_loader.backend)
        return f"{backend}:{architecture}" if architecture else backend, "native kernel"
    if _has_triton(op, device) and dtype not in KERNELS[op].triton_refuses:
        return "triton", f"{_why_not_native(op, device, dtype)}; Triton is installed"
    if _is_torchs(op, device):
        return "torch", "dense products on a GPU are the vendor's BLAS"
    return "reference", _why_not_native(op, device, dtype)


def isa() -> str:
    """The instruction set level or architecture that native kernels use here; '' without any."""
    level = getattr(_loader.bind, "isa", None)
    if level is None:
        return ""
    return str(level() if callable(level) else level)


def is_gpu(x: Array) -> bool:
    """Whether x is in a GPU's memory."""
    return _device_of(x) in _GPUS


def triton_installed() -> bool:
    """True when the triton package can be imported (it is not imported here)."""
    return importlib.util.find_spec("triton") is not None


def _native(op: str, device: str) -> Native | None:
    if _loader.bind is None or device not in _SERVES.get(str(_loader.backend), ()):
        return None
    if foreign_chip():
        return None
    return next((run for name, run in _bound(op).items() if _is_for_this_chip(name)), None)


def _bound(op: str) -> dict[str, Native]:
    """The functions of the loaded library that take calls of op, whatever the chip, by name."""
    names = [op]
    while other := KERNELS[names[-1]].elsewhere:
        names.append(other)
    found = {name: getattr(_loader.bind, name, None) for name in names}
    return {name: run for name, run in found.items() if run is not None}


def _is_bound(op: str, run: Native) -> bool:
    """Whether run, chosen for op, is the library's own."""
    name = op
    while name:
        if run is getattr(_loader.bind, name, None):
            return True
        name = KERNELS[name].elsewhere
    return False


def foreign_chip() -> str:
    """Says that the ROCm library has no code for this GPU; '' where it has some, and without a GPU,
    where nothing is known."""
    if _loader.backend != "rocm" or not _loader.targets:
        return ""
    chip = isa()
    if not chip.startswith("gfx") or chip == "gfx" or chip in _loader.targets:
        return ""
    known = " and ".join(_loader.targets)
    return f"the rocm library has code for {known}, this GPU is {chip}"


def _is_for_this_chip(name: str) -> bool:
    only = _architectures(name)
    return not only or isa() in only


def _architectures(name: str) -> tuple[str, ...]:
    """Those that the loaded library has the kernel for; empty: no such limit."""
    library = KERNELS[name].library(_loader.backend)
    return () if library is None else library.archs


def _refuses(op: str, dtype: str) -> bool:
    """True where the loaded library has the kernel, but not for this dtype."""
    library = KERNELS[op].library(_loader.backend)
    return library is not None and dtype in library.refuses


def _has_triton(op: str, device: str) -> bool:
    return KERNELS[op].triton and device in _GPUS and triton_installed()


def _is_torchs(op: str, device: str) -> bool:
    """True where torch is the implementation of choice."""
    return KERNELS[op].torch and device in _GPUS


def _why_not_native(op: str, device: str, dtype: str = "bfloat16") -> str:
    if _loader.bind is None:
        return _loader.reason
    if device not in _SERVES.get(str(_loader.backend), ()):
        return f"the {_loader.backend} kernels do not serve {device} tensors"
    if chip := foreign_chip():
        return chip
    if _native(op, device) is not None and _refuses(op, dtype):
        return f"the {_loader.backend} library has no {dtype} {op}"
    only = [arch for name in _bound(op) for arch in _architectures(name)]
    if only:
        return f"the {_loader.backend} library has {op} for {', '.join(only)} only"
    return f"the {_loader.backend} library has no {op}"


def _device_of(x: Array) -> str:
    try:
        return str(x.device.type)
    except AttributeError:
        return device_type(x)


def _choose(op: str, device: str) -> Native | None:
    by_op = _chosen.setdefault(device, {})
    if op in by_op:
        return by_op[op]
    found = _native(op, device)
    if found is None and _has_triton(op, device):
        found = getattr(triton, op)
    if found is None and not _is_torchs(op, device):
        _report(op, device, _why_not_native(op, device))
    by_op[op] = found
    return found


def _report(op: str, device: str, why: str) -> None:
    if _mode == "error":
        raise RuntimeError(f"{op} on {device}: no kernel ({why}) and set_fallback is 'error'")
    # One warning for a missing library, not one for each of its ops.
    text = f"radix_kernels runs its reference: {why}"
    if _mode == "warn" and text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)
