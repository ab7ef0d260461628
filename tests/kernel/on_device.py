"""Runs the public ops on a GPU for tests that make and check their tensors on the CPU.

For the time of a call the storages behind the arguments are copied to the GPU as they are, with
the poison around and between the rows, and back afterwards: a write outside of a view is seen on
the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack

import radix_kernels
from radix_kernels import _dispatch, _loader
from tests.gcn import arrays, executed, library

# cupy: on the GPU, in CuPy's arrays; rocm-sim: AMD's machine code, executed by tests/gcn
DEVICES = ("cpu", "cuda", "cupy", "rocm-sim")
_PACKING = ("pack_weight", "unpack_weight")
_GPU = "cuda"
_LARGE = 1 << 30  # bytes; of a larger storage only the view is copied


def no_library_for(device: str) -> str:
    """Why no native library serves this device here; '' where one does.

    Without one every op runs its reference, and its tests compare the reference with itself.
    """
    serving = {"cpu": ("cpu",), "rocm-sim": ("rocm",)}.get(device, ("cuda", "rocm"))
    if _loader.backend not in serving:
        return _loader.reason or f"the installed library is of the {_loader.backend} backend"
    if device == "cpu":
        return ""
    if device == "rocm-sim":
        library.load()
    if _dispatch.isa().startswith("no "):
        return f"the {_loader.backend} library finds no GPU"
    if device == "rocm-sim":
        return ""
    return "" if torch.cuda.is_available() else "torch finds no GPU"


def patch(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Every op of radix_kernels runs on the GPU until the monkeypatch is undone."""
    for name, dtypes in radix_kernels.capabilities()["ops"].items():
        original = getattr(radix_kernels, name)
        native = any(entry["impl"].startswith("rocm") for entry in dtypes.values())
        there = _skipped(name) if device == "rocm-sim" and not native else _moved(original, device)
        monkeypatch.setattr(radix_kernels, name, there)
    for name in _PACKING:
        monkeypatch.setattr(radix_kernels, name, _moved(getattr(radix_kernels, name), device))


def _skipped(name: str) -> Callable[..., Any]:
    """In the place of an op that Triton or torch would run: they need a real GPU."""

    def call(*args: Any, **options: Any) -> Any:
        pytest.skip(f"the rocm library has no {name}")

    return call


def _moved(op: Callable[..., Any], device: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        on_executor = device == "rocm-sim"
        trip = _ExecutorTrip(device) if on_executor else _Trip(device)
        there = [trip.send(x) for x in args]
        given = {name: trip.send(x) for name, x in options.items()}
        try:
            with executed.counted(op.__name__) if on_executor else contextlib.nullcontext():
                result = op(*there, **given)
        finally:
            trip.end()
        return trip.receive(result)

    return call


class _Trip:
    """The tensors of one call: views of one storage stay views of one storage."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._storages: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []  # of large storages
        self._origin: dict[int, tuple[Any, torch.Tensor]] = {}

    def send(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(self.send(part) for part in x)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            parts = {
                field.name: self.send(getattr(x, field.name))
                for field in dataclasses.fields(x)
                if field.init
            }
            return dataclasses.replace(x, **parts)
        if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
            return x
        there: Any = self._view(x)
        if self._device == "cupy":
            there = _as_cupy(there)
        self._origin[id(there)] = (there, x)  # holds it, so that its id stays its own
        return there

    def _view(self, x: torch.Tensor) -> Any:
        storage = x.untyped_storage()
        key = storage.data_ptr() or id(x), x.dtype
        large = storage.nbytes() > _LARGE
        if key not in self._storages:
            flat = torch.empty(0, dtype=x.dtype).set_(storage)
            copy = torch.empty_like(flat, device=_GPU)
            self._storages[key] = flat, copy if large else copy.copy_(flat)
        there = self._storages[key][1].as_strided(x.shape, x.stride(), x.storage_offset())
        if large:
            there.copy_(x)
            self._views.append((x, there))
        return there

    def end(self) -> None:
        torch.cuda.synchronize()
        for flat, copy in self._storages.values():
            if flat.nbytes <= _LARGE:
                flat.copy_(copy)
        for view, copy in self._views:
            view.copy_(copy)

    def receive(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(self.receive(x) for x in result)
        if id(result) in self._origin:
            return self._origin[id(result)][1]
        if isinstance(result, torch.Tensor):
            return result.cpu()
        if hasattr(result, "__dlpack__"):
            assert self._device == "cupy", "the result is of another framework than the arguments"
            return from_dlpack(result).cpu()
        return result


class _ExecutorTrip(_Trip):
    """Arrays of the stand-in GPU share the tensors' memory: nothing is copied."""

    def _view(self, x: torch.Tensor) -> Any:
        return arrays.Array(x)

    def end(self) -> None:
        arrays.close_memory()

    def receive(self, result: Any) -> Any:
        if isinstance(result, arrays.Array) and id(result) not in self._origin:
            return result.tensor
        return super().receive(result)


def _as_cupy(x: torch.Tensor) -> Any:
    cupy = pytest.importorskip("cupy")
    try:
        return cupy.from_dlpack(x)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        if str(x.dtype) not in ("torch.bfloat16", "torch.float8_e4m3fn"):
            raise
        pytest.skip(f"CuPy has no {x.dtype}: {error}")
