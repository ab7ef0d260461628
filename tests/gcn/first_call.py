"""A process that uses the ROCm wheel as a first user would, without torch: imports it, and makes
one call on memory of a GPU.

`python -m tests.gcn.first_call STEP...`, with the steps `capabilities`, `torch` (import it), `find
FOLDER` (from then on packages are found there too), `load FILE` and `call`. Prints, as JSON, the
last capabilities, what the call said, and for each HIP runtime in the process its launches.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

import radix_kernels as rk

ROCM = 10  # DLPack's kDLROCM
ROWS = 3
WIDTH = 64


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
        ("context", ctypes.c_void_p),  # what follows in a DLManagedTensor
        ("deleter", ctypes.c_void_p),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Array:
    """A float32 matrix of numpy that says it lies on GPU 0."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.shape = values.shape
        self.ndim = values.ndim
        self.dtype = "float32"

    def __dlpack_device__(self) -> tuple[int, int]:
        return ROCM, 0

    def __dlpack__(self, **_: Any) -> Any:
        rows, width = self.values.shape
        self._sizes = (ctypes.c_int64 * 2)(rows, width)
        self._strides = (ctypes.c_int64 * 2)(width, 1)
        self._tensor = _Tensor(
            data=self.values.ctypes.data,
            device=ROCM,
            ndim=2,
            code=2,
            bits=32,
            lanes=1,
            shape=ctypes.addressof(self._sizes),
            strides=ctypes.addressof(self._strides),
        )
        return _new_capsule(ctypes.addressof(self._tensor), b"dltensor", None)


def runtimes() -> dict[str, ctypes.CDLL]:
    """Every HIP runtime in this process, by its file."""
    maps = Path("/proc/self/maps").read_text()
    found = sorted(set(re.findall(r"/\S*/libamdhip64\.so\S*", maps)))
    return {path: ctypes.CDLL(path) for path in found}


def launches() -> dict[str, int]:
    counts = {}
    for path, copy in runtimes().items():
        copy.gcn_report.restype = ctypes.c_char_p
        counts[path] = json.loads(copy.gcn_report())["launches"]
    return counts


def call() -> str:
    """`right`, `wrong`, or the error of one call."""
    x = np.random.default_rng(0).standard_normal((ROWS, 2 * WIDTH)).astype(np.float32)
    out = np.full((ROWS, WIDTH), np.nan, np.float32)
    rk.capabilities()  # opens the runtime, so that its memory can be told of the arrays
    for copy in runtimes().values():
        copy.gcn_map.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        copy.gcn_map(x.ctypes.data, x.nbytes)
        copy.gcn_map(out.ctypes.data, out.nbytes)
    try:
        rk.silu_and_mul(Array(x), out=Array(out))
    except RuntimeError as error:
        return str(error)
    gate = x[:, :WIDTH].astype(np.float64)
    want = gate / (1 + np.exp(-gate)) * x[:, WIDTH:]
    return "right" if np.allclose(out, want, rtol=1e-5, atol=1e-6) else "wrong"


def main() -> None:
    rk.set_fallback("error")
    said: dict[str, Any] = {}
    steps = iter(sys.argv[1:])
    for step in steps:
        if step == "capabilities":
            facts = rk.capabilities()
            said |= {name: facts[name] for name in ("isa", "devices", "problem", "runtime")}
            said["impl"] = facts["ops"]["silu_and_mul"]["float32"]["impl"]
        elif step == "torch":
            importlib.import_module("torch")
        elif step == "find":
            sys.path.insert(0, next(steps))
            importlib.invalidate_caches()
        elif step == "load":
            ctypes.CDLL(next(steps))
        elif step == "call":
            said["call"] = call()
        else:
            raise SystemExit(f"unknown step {step}")
    said["launches"] = launches()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
