"""A caller of the ROCm library in C's way, on the HIP runtime of fake_hip.c.

`python -m tests.kernel.fake_hip LIBRARY` calls rk_silu_and_mul twice on (unreadable) memory of GPU
1, with 5 rows of 2 x 64 bfloat16. RADIX_LIBHIP names the runtime.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

ROCM = 10
BFLOAT = 4
SOURCE = Path(__file__).with_suffix(".c")


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


class _Args(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("input", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    ]


def build(folder: Path) -> Path:
    """Compiles the fake runtime; its file name is what the shim knows it by."""
    library = folder / "libamdhip64.so.7"
    command = ["gcc", "-shared", "-fPIC", "-w", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def main() -> None:
    library = ctypes.CDLL(sys.argv[1])
    library.rk_last_error.restype = ctypes.c_char_p
    keep = []

    def tensor(*shape: int) -> int:
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        strides = (ctypes.c_int64 * len(shape))(*([shape[-1]] * (len(shape) - 1)), 1)
        address = 1 << 40
        made = _Tensor(
            data=address,
            device=ROCM,
            id=1,
            ndim=len(shape),
            code=BFLOAT,
            bits=16,
            lanes=1,
            shape=ctypes.addressof(sizes),
            strides=ctypes.addressof(strides),
            offset=0,
        )
        keep.extend([sizes, strides, made])
        return ctypes.addressof(made)

    isa = ctypes.c_char_p()
    library.rk_isa(ctypes.byref(isa))
    print("isa", (isa.value or b"").decode())
    args = _Args(struct_size=ctypes.sizeof(_Args), input=tensor(5, 128), out=tensor(5, 64))
    for _ in range(2):
        status = library.rk_silu_and_mul(ctypes.byref(args), ctypes.c_int64(77))
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        print("status", status, library.rk_last_error().decode() if status else "")


if __name__ == "__main__":
    main()
