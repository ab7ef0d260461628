"""A HIP runtime that runs nothing and says what it was asked for, and a C caller of the library.

`python -m tests.kernel.fake_hip LIBRARY` calls rk_rmsnorm on (unreadable) memory of AMD GPU 1 twice:
with rows of 64 bfloat16, and with the launch failing. RADIX_LIBHIP names the built runtime.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

ROCM, BFLOAT, INVALID_LAUNCH = 10, 4, 9
SOURCE = r"""
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
typedef struct { unsigned x, y, z; } Dim3;
static const void* hosts[1024];
static const char* names[1024];
static int count, current, launches;
void** __hipRegisterFatBinary(const void* binary) { static void* module; return &module; }
void __hipRegisterFunction(void** m, const void* host, char* device, const char* name, int limit, void* a, void* b,
                           void* c, void* d, int* e) {
  hosts[count] = host;
  names[count++] = name;
}
int hipGetDeviceCount(int* out) { *out = 2; return 0; }
int hipGetDevice(int* out) { *out = current; return 0; }
int hipSetDevice(int device) { current = device; printf("device %d\n", device); return 0; }
const char* hipGetErrorString(int error) { return error == 9 ? "fake invalid launch" : "?"; }
int hipLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** args, size_t shared, void* stream) {
  for (int i = 0; i < count; i++)
    if (hosts[i] == kernel)
      printf("%s|%u,%u,%u|%u,%u,%u|%zu|%zu|%g\n", names[i], grid.x, grid.y, grid.z, block.x, block.y, block.z, shared,
             (size_t)stream, (double)*(float*)args[4]);
  return launches++ ? 9 : 0;
}
"""


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Args(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("eps", ctypes.c_float), ("input", ctypes.c_void_p),
        ("weight", ctypes.c_void_p), ("out", ctypes.c_void_p),
    ]  # fmt: skip


def build(folder: Path) -> Path:
    """Compiles the fake runtime; its file name is what the shim knows it by."""
    library = folder / "libamdhip64.so.7"
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=SOURCE, text=True, check=True)
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
            address, ROCM, 1, len(shape), BFLOAT, 16, 1,
            ctypes.addressof(sizes), ctypes.addressof(strides), 0,
        )  # fmt: skip
        keep.extend([sizes, strides, made])
        return ctypes.addressof(made)

    isa = ctypes.c_char_p()
    library.rk_isa(ctypes.byref(isa))
    print("isa", (isa.value or b"").decode())
    args = _Args(ctypes.sizeof(_Args), 0.5, tensor(5, 64), tensor(64), tensor(5, 64))
    for _ in range(2):
        status = library.rk_rmsnorm(ctypes.byref(args), ctypes.c_int64(77))
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        print("status", status, library.rk_last_error().decode() if status else "")


if __name__ == "__main__":
    main()
