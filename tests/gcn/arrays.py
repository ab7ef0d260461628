"""Arrays that say they lie on an AMD GPU; their memory is a torch CPU tensor's.

What a call exports by DLPack is what its launches may touch: the elements of each tensor and no
byte between or behind its rows.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.gcn import library

ROCM = 10  # DLPack's kDLROCM
_CODES_BY_NAME = {
    "bfloat16": (4, 16),
    "float16": (2, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "int8": (0, 8),
    "int16": (0, 16),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "uint16": (1, 16),
    "uint32": (1, 32),
    "uint64": (1, 64),
    "bool": (6, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
}
# An old torch lacks some of them.
_CODES = {getattr(torch, key): code for key, code in _CODES_BY_NAME.items() if hasattr(torch, key)}
_MOST_ROWS = 4096  # of a tensor with more of them the whole span is open


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_open: list[tuple[int, int]] = []  # ranges of memory that launches may touch


class Array:
    """A tensor on GPU `device`. Two of the same memory are two views of it."""

    def __init__(self, tensor: torch.Tensor, device: int = 0) -> None:
        self.tensor = tensor
        self._device = device
        self._exported: tuple[Any, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def T(self) -> Array:
        return Array(self.tensor.T, self._device)

    def __dlpack_device__(self) -> tuple[int, int]:
        return ROCM, self._device

    def __dlpack__(self, *, max_version: Any = None) -> Any:
        """A capsule that stays valid for the array's life."""
        x = self.tensor
        sizes = (ctypes.c_int64 * max(x.ndim, 1))(*x.shape)
        strides = (ctypes.c_int64 * max(x.ndim, 1))(*x.stride())
        code, bits = _CODES[x.dtype]
        managed = _Managed(
            _Tensor(
                data=x.data_ptr(),
                device=ROCM,
                id=self._device,
                ndim=x.ndim,
                code=code,
                bits=bits,
                lanes=1,
                shape=ctypes.addressof(sizes),
                strides=ctypes.addressof(strides),
                offset=0,
            )
        )
        self._exported = managed, sizes, strides
        _open_memory(x)
        return _new_capsule(ctypes.addressof(managed), b"dltensor", None)


# The package allocates outputs in the top-level module of an array's type.
Array.__module__ = "rocm_arrays"
sys.modules["rocm_arrays"] = sys.modules[__name__]


def empty(shape: Sequence[int], dtype: str = "float32") -> Array:
    """An array of bytes 0xff: NaN, or -1."""
    tensor = torch.empty(tuple(shape), dtype=getattr(torch, str(dtype).rpartition(".")[2]))
    tensor.view(torch.uint8).fill_(255) if tensor.ndim else tensor.fill_(-1)
    return Array(tensor)


def close_memory() -> None:
    """Launches may touch none of the arrays any more."""
    stand_in = library.load()
    for address, size in _open:
        stand_in.gcn_unmap(address, size)
    _open.clear()


@contextlib.contextmanager
def opened(*tensors: torch.Tensor) -> Iterator[None]:
    """Launches may touch these tensors meanwhile."""
    stand_in = library.load()
    ranges = [part for x in tensors for part in _ranges(x)]
    for address, size in ranges:
        stand_in.gcn_map(address, size)
    try:
        yield
    finally:
        for address, size in ranges:
            stand_in.gcn_unmap(address, size)


def _open_memory(x: torch.Tensor) -> None:
    stand_in = library.load()
    for address, size in _ranges(x):
        stand_in.gcn_map(address, size)
        _open.append((address, size))


def _ranges(x: torch.Tensor) -> list[tuple[int, int]]:
    """(address, bytes) of the parts of a tensor that lie together."""
    if not x.numel():
        return []
    item = x.element_size()
    inner = 1  # elements that lie together
    dims = sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1 and s)
    while dims and dims[0][0] <= inner:
        step, count = dims.pop(0)
        inner = max(inner, step * (count - 1) + inner)
    if math.prod(n for _, n in dims) > _MOST_ROWS:
        span = sum(s * (n - 1) for s, n in dims) + inner
        return [(x.data_ptr(), span * item)]
    offsets = (sum(at) for at in itertools.product(*(range(0, s * n, s) for s, n in dims)))
    return [(x.data_ptr() + offset * item, inner * item) for offset in offsets]
