"""DLPack producers made by hand, to show the binding what no framework here produces."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

CPU = 1
CUDA = 2
FLOAT = 2
READ_ONLY = 1

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


class Raw:
    """A float32 tensor in host memory, exported with whatever is asked for.

    version: major version of a versioned capsule (RawVersioned), None for the old kind; strides
    False leaves them out; byte_offset counts from data, which is moved back by as much.
    """

    def __init__(
        self,
        tensor: Tensor,
        *,
        version: int | None = None,
        flags: int = 0,
        device: int = CPU,
        lanes: int = 1,
        strides: bool = True,
        byte_offset: int = 0,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.tensor = tensor
        self.version = version
        self.flags = flags
        sizes = tuple(tensor.shape) if shape is None else shape
        steps = tensor.stride() if shape is None else (1,) * len(shape)
        self.shape = (ctypes.c_int64 * max(len(sizes), 1))(*sizes)
        self.strides = (ctypes.c_int64 * max(len(sizes), 1))(*steps)
        self.view = _Tensor(
            data=tensor.data_ptr() - byte_offset,
            device_type=device,
            device_id=0,
            ndim=len(sizes),
            code=FLOAT,
            bits=32,
            lanes=lanes,
            shape=ctypes.addressof(self.shape),
            strides=ctypes.addressof(self.strides) if strides else None,
            byte_offset=byte_offset,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return int(self.view.device_type), 0

    def __dlpack__(self, **options: Any) -> Any:
        if self.version is None:
            if options:
                raise TypeError("unexpected keyword argument")  # like a producer of before 1.0
            self.managed: ctypes.Structure = _Managed(tensor=self.view, manager=None, deleter=None)
            name = b"dltensor"
        else:
            assert options == {"max_version": (1, 0)}
            self.managed = _Versioned(
                major=self.version,
                minor=0,
                manager=None,
                deleter=None,
                flags=self.flags,
                tensor=self.view,
            )
            name = b"dltensor_versioned"
        return _new_capsule(ctypes.addressof(self.managed), name, None)


class RawVersioned(Raw):
    """A type of its own: the binding remembers, by type, who takes max_version."""


class OnlyDlpack:
    """What an older torch offers: __dlpack__ without versions, and no exchange API."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def requires_grad(self) -> bool:
        return self.tensor.requires_grad

    def detach(self) -> OnlyDlpack:
        return OnlyDlpack(self.tensor.detach())

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, stream: int | None = None) -> Any:
        return self.tensor.__dlpack__()
