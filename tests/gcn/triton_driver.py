"""Triton's driver over the executor: `kernel[grid](...)` compiles for an AMD GPU and runs there.

Tensors are torch CPU tensors. A launch may touch the elements of the tensors it is given and no
byte between or behind their rows.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver as active_driver

from radix_kernels.triton import fp8_gemm, grouped_gemm, moe
from tests.gcn import arrays, executed, library
from tests.gcn.listing import address_of, listing

_NATIVE_FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
# Targets that the LLVM of the distribution knows; of others the compiler's assembly is read.
_DISASSEMBLED = ("gfx90a", "gfx942")
_LDS_BYTES = 65536
_LANES = 64
# The struct format of each of Triton's types, as the argument segment has it.
_FORMATS = {
    "i1": "b",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u1": "B",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp32": "f",
    "f32": "f",
    "fp64": "d",
}
_OWN_POINTERS = 2  # that Triton adds behind the arguments: global and profiling scratch


class LaunchError(RuntimeError):
    """A launch that the executor ended, or a code object that it refused; the text says why."""


def install(target: str) -> None:
    """Triton compiles for `target` ("gfx942", "gfx950") and runs on the executor, which this
    process must not have loaded for another target. The package's host code then chooses as on
    that chip, for the rest of the process."""
    library.load()
    torch.version.hip = "7.0"
    for module in (fp8_gemm, grouped_gemm, moe):
        module.multiplies = lambda device, dtype: dtype == _NATIVE_FP8[target]
        module.shared_memory = lambda device: _LDS_BYTES
    active_driver.set_active(ExecutorDriver(target))


class ExecutorDriver(DriverBase):
    def __init__(self, target: str) -> None:
        self.target = target
        self.utils = self
        self.launcher_cls = _Launcher
        self._assembly = Path()  # of the kernel that is loaded next
        if target not in _DISASSEMBLED:
            knobs.runtime.kernel_load_start_hook.add(self._note_assembly)

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(backend="hip", arch=self.target, warp_size=_LANES)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        if device:
            raise LaunchError(f"there is one GPU, not number {device}")

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        raise LaunchError("the executor has no clock")

    def get_device_properties(self, device: int) -> dict[str, Any]:
        return {"max_shared_mem": _LDS_BYTES, "warpSize": _LANES, "arch": self.target}

    def _note_assembly(self, module: Any, function: Any, name: str, files: Any, key: str) -> None:
        self._assembly = Path(files[f"{name}.amdgcn"])

    def load_binary(
        self, name: str, code: bytes, shared: int, device: int
    ) -> tuple[Any, Any, int, int, int]:
        """(module, function, registers, spills, threads); the last three as for a full GPU."""
        hip = library.load()
        module = ctypes.c_void_p()
        function = ctypes.c_void_p()
        if self.target not in _DISASSEMBLED:
            text = listing(self._assembly.read_text(), address_of(code, name))
            hip.gcn_listing(code, ctypes.c_size_t(len(code)), text.encode())
        check(hip.hipModuleLoadData(ctypes.byref(module), code))
        check(hip.hipModuleGetFunction(ctypes.byref(function), module, name.encode()))
        return module, function, 0, 0, 1024


class _Launcher:
    """Of one compiled kernel: packs the arguments of a launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._name = source.name
        self._types = list(source.signature.values())
        self._threads = metadata.num_warps * _LANES
        self._shared = metadata.shared

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: ctypes.c_void_p,
        packed_metadata: Any,
        launch_metadata: Any,
        enter_hook: Any,
        exit_hook: Any,
        *args: Any,
    ) -> None:
        if not x * y * z:
            return
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        words = [
            _packed(type_, arg)
            for type_, arg in zip(self._types, args, strict=True)
            if type_ != "constexpr"
        ]
        words += [bytes(8)] * _OWN_POINTERS
        held = [ctypes.create_string_buffer(word, len(word)) for word in words]
        values = (ctypes.c_void_p * len(held))(*(ctypes.addressof(word) for word in held))
        grid = (x, y, z, self._threads, 1, 1)
        with arrays.opened(*tensors), executed.counted(self._name):
            hip = library.load()
            none = ctypes.c_void_p(None)
            check(hip.hipModuleLaunchKernel(function, *grid, self._shared, none, values, None))


def _packed(type_: str, value: Any) -> bytes:
    """An argument's bytes in the argument segment."""
    if not type_.startswith("*"):
        return struct.pack(_FORMATS[type_], value)
    if value is None:
        return bytes(8)
    return struct.pack("Q", value.data_ptr())


def check(error: int) -> None:
    """Raises LaunchError for everything but hipSuccess."""
    if error:
        raise LaunchError(library.load().hipGetErrorString(error).decode())
