"""Arrays of any framework: device names, allocation, and zero-copy views as torch tensors.

Importing this module does not import torch; the functions that need it import it on first use.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

from ._not_tensor import not_a_tensor

# A tensor of any DLPack framework. Nothing better can be said without importing a framework.
Array = Any

_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "rocm", 11: "cpu", 13: "cuda"}


def is_torch(x: Array) -> bool:
    """True for a torch tensor (never imports torch)."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def device_type(x: Array) -> str:
    """`cpu`, `cuda`, `rocm` or the framework's own name. TypeError when x is no tensor."""
    if is_torch(x):
        return str(x.device.type)
    _require_tensor(x)
    code = int(x.__dlpack_device__()[0])
    return _DLPACK_DEVICES.get(code, f"dlpack:{code}")


def _require_tensor(x: Array) -> None:
    if not hasattr(x, "__dlpack_device__"):
        raise not_a_tensor(x)


def shape(x: Array) -> tuple[int, ...]:
    """The shape of a tensor or of a packed weight. TypeError when x is neither."""
    try:
        return tuple(x.shape)
    except AttributeError:
        raise not_a_tensor(x) from None


def empty_like(x: Array) -> Array:
    """An uninitialised dense array with the shape, dtype, device and framework of x."""
    if is_torch(x):
        return sys.modules["torch"].empty_like(x)
    return empty(x, shape(x))


def empty(x: Array, shape: Sequence[int], dtype: str | None = None) -> Array:
    """An uninitialised array on x's device, of x's framework; dtype by name (default x's)."""
    if is_torch(x):
        if dtype is None:
            return x.new_empty(shape)
        return x.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
    _require_tensor(x)
    framework = import_module(type(x).__module__.partition(".")[0])
    if not hasattr(framework, "empty"):
        raise TypeError(
            f"cannot allocate an output for {type(x).__module__}.{type(x).__name__}: pass out="
        )
    return framework.empty(tuple(shape), dtype=dtype or x.dtype)


def as_torch(x: Array) -> Any:
    """A torch tensor that shares x's memory, outside autograd. None stays None. TypeError when x
    is something else."""
    if x is None:
        return None
    torch = import_module("torch")
    if isinstance(x, torch.Tensor):
        return x.detach()
    _require_tensor(x)
    return torch.from_dlpack(x)


def torch_views(*arrays: Array) -> tuple[Any, ...]:
    """`as_torch` of each."""
    return tuple(as_torch(x) for x in arrays)


def dtype_name(x: Array) -> str:
    """The dtype's bare name in any framework: `bfloat16`, `float32`, `int64`. TypeError when x has
    none."""
    try:
        return _bare_name(x.dtype)
    except AttributeError:
        raise not_a_tensor(x) from None


@cache
def _bare_name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]
