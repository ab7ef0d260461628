"""Argument checks of the reference path, in the words that the native library uses.

Native ops check in the library; these give the fallback the same manners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FLOATS = ("bfloat16", "float16", "float32")
INTS = ("int32", "int64")


def dtype(op: str, name: str, x: Any, allowed: Sequence[str]) -> None:
    """TypeError unless x is a tensor with one of the dtypes (names)."""
    if not hasattr(x, "dtype"):
        raise TypeError(f"{op}: {name} is {type(x).__name__}, expected a tensor")
    got = str(x.dtype).rpartition(".")[2]
    if got not in allowed:
        raise TypeError(f"{op}: {name} has dtype {got}, expected {' or '.join(allowed)}")


def rank(op: str, name: str, x: Any, *ndim: int) -> None:
    """ValueError unless x has one of the numbers of dimensions."""
    if x.ndim not in ndim:
        wanted = " or ".join(str(n) for n in ndim)
        raise ValueError(f"{op}: {name} has {x.ndim} dimensions, expected {wanted}")


def shape(op: str, name: str, x: Any, expected: Sequence[int], why: str = "") -> None:
    """ValueError unless x has exactly this shape."""
    if tuple(x.shape) != tuple(expected):
        note = f" ({why})" if why else ""
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}, expected {list(expected)}{note}")


def contiguous_last(op: str, name: str, x: Any) -> None:
    """ValueError unless the last dimension has stride 1 (or at most one element)."""
    if x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{op}: {name} has last stride {x.stride(-1)}, expected 1")


def same_dtype(op: str, name: str, x: Any, other: str, y: Any) -> None:
    """TypeError unless x and y have one dtype."""
    if x.dtype != y.dtype:
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, expected {y.dtype} (as {other})")


def require(op: str, condition: bool, text: str) -> None:
    """ValueError with the text unless the condition holds."""
    if not condition:
        raise ValueError(f"{op}: {text}")
