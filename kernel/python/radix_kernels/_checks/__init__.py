"""Argument checks for Triton and the reference, in the words of the native library.

The library checks the arguments of its own kernels. Triton's kernels and the reference check
nothing: their arguments are checked here, in one module per family over the functions of this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FLOATS = ("bfloat16", "float16", "float32")
HALVES = ("bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
INTS = ("int32", "int64")
CONVERTER = "radix_kernels.native_fp8() turns weights and scales into the chip's FP8"


def dtype(op: str, name: str, x: Any, allowed: Sequence[str]) -> None:
    """TypeError unless x is a tensor with one of the dtypes (names)."""
    _tensor(op, name, x)
    got = str(x.dtype).rpartition(".")[2]
    if got not in allowed:
        raise TypeError(f"{op}: {name} has dtype {got}, expected {' or '.join(allowed)}")


def _tensor(op: str, name: str, x: Any) -> None:
    """TypeError unless x is a tensor."""
    if not hasattr(x, "dtype"):
        raise TypeError(f"{op}: {name} is {type(x).__name__}, expected a tensor")


def rank(op: str, name: str, x: Any, *ndim: int) -> None:
    """TypeError unless x is a tensor, ValueError unless it has one of the numbers of dimensions."""
    _tensor(op, name, x)
    if x.ndim not in ndim:
        wanted = " or ".join(str(n) for n in ndim)
        raise ValueError(f"{op}: {name} has {x.ndim} dimensions, expected {wanted}")


def shape(op: str, name: str, x: Any, expected: Sequence[int], why: str = "") -> None:
    """TypeError unless x is a tensor, ValueError unless it has exactly this shape."""
    _tensor(op, name, x)
    if tuple(x.shape) != tuple(expected):
        note = f" ({why})" if why else ""
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}, expected {list(expected)}{note}")


def contiguous_last(op: str, name: str, x: Any) -> None:
    """ValueError unless the last dimension has stride 1 (or at most one element)."""
    if x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{op}: {name} has last stride {x.stride(-1)}, expected 1")


def aligned(op: str, name: str, x: Any, size: int = 16) -> None:
    """ValueError unless x (torch) and all its rows begin at multiples of `size` bytes."""
    require(op, x.data_ptr() % size == 0, f"{name} is not aligned to {size} bytes")
    for dim in range(x.ndim - 1):
        text = (
            f"{name} has a stride of {x.stride(dim)} elements, expected a multiple of {size} bytes"
        )
        require(op, x.shape[dim] <= 1 or x.stride(dim) * x.element_size() % size == 0, text)


def same_dtype(op: str, name: str, x: Any, other: str, y: Any) -> None:
    """TypeError unless x is a tensor with y's dtype."""
    _tensor(op, name, x)
    if x.dtype != y.dtype:
        both = {str(x.dtype).rpartition(".")[2], str(y.dtype).rpartition(".")[2]}
        help = f"; {CONVERTER}" if both == set(FP8) else ""
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, expected {y.dtype} (as {other}){help}")


def require(op: str, condition: bool, text: str) -> None:
    """ValueError with the text unless the condition holds."""
    if not condition:
        raise ValueError(f"{op}: {text}")
