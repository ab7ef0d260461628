"""Device: the one place that knows CPU, CUDA and ROCm apart (outside kernels and weights).

A Stream runs work in the order of `submit`, while the caller goes on. On a GPU the work's launches
are queued on a device stream by the caller's own thread; on the CPU one engine thread runs the
work itself (kernels release the GIL). So overlap is one code path.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from .errors import ConfigError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Ticket(Protocol[T_co]):
    """Work that was submitted."""

    def done(self) -> bool: ...

    def result(self) -> T_co:
        """Waits until the work (on a GPU: the device) is done; raises what the work raised."""
        ...


class Stream(Protocol):
    def submit(self, work: Callable[[], T], /) -> Ticket[T]:
        """Runs `work` after all that was submitted before it."""
        ...

    def close(self) -> None:
        """Waits for what was submitted; nothing may be submitted afterwards."""


class _ThreadStream(ThreadPoolExecutor):
    def close(self) -> None:
        self.shutdown(wait=True)


class _GpuTicket(Generic[T]):
    def __init__(self, value: T, event: torch.cuda.Event) -> None:
        self._value = value
        self._event = event

    def done(self) -> bool:
        return self._event.query()

    def result(self) -> T:
        self._event.synchronize()
        return self._value


class _GpuStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        with torch.cuda.stream(self._stream):
            value = work()
            event = torch.cuda.Event()
            event.record()
        return _GpuTicket(value, event)

    def close(self) -> None:
        self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. On the CPU both respect the limits of the cgroup."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class Device:
    """`kind` is cpu, cuda or rocm; `torch_device` that of tensors (ROCm is "cuda")."""

    kind: str
    torch_device: torch.device

    @classmethod
    def resolve(cls, name: str = "auto", index: int = 0) -> Device:
        """`name`: auto, cpu or cuda (NVIDIA or AMD). Makes a GPU the current one of the thread.
        Raises ConfigError when it is not there."""
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu":
            return cls("cpu", torch.device("cpu"))
        if name != "cuda":
            raise ConfigError(f"--device {name} is unknown")
        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch sees no GPU")
        if index >= torch.cuda.device_count():
            raise ConfigError(f"GPU {index} is not there: torch sees {torch.cuda.device_count()}")
        torch.cuda.set_device(index)
        kind = "rocm" if torch.version.hip is not None else "cuda"
        return cls(kind, torch.device("cuda", index))

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def name(self) -> str:
        return "cpu" if self.is_cpu else torch.cuda.get_device_name(self.torch_device)

    def stream(self) -> Stream:
        if self.is_cpu:
            return _ThreadStream(max_workers=1, thread_name_prefix="radix-engine")
        return _GpuStream(self.torch_device)

    def host_empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that this device copies from and to asynchronously. It may be dropped while
        a copy runs: torch's pinned allocator keeps it until the stream has passed."""
        return torch.empty(shape, dtype=dtype, pin_memory=not self.is_cpu)

    def memory(self) -> Memory:
        if self.is_cpu:
            return cpu_memory()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return Memory(total, free)

    def synchronize(self) -> None:
        if not self.is_cpu:
            torch.cuda.synchronize(self.torch_device)


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` on the device; on the CPU itself. From pinned memory, since a copy from other memory
    makes the host wait for the device."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def cpu_memory(root: Path = Path("/")) -> Memory:
    """Total and available memory of this process: the machine's, or the tightest cgroup's."""
    info = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        info[key] = int(value.split()[0]) * 1024
    total, available = info["MemTotal"], info["MemAvailable"]
    for folder, limit_name, usage_name in _cgroups(root):
        limit = _read_int(folder / limit_name)
        usage = _read_int(folder / usage_name)
        if limit is None or usage is None or limit >= info["MemTotal"]:
            continue
        total = min(total, limit)
        available = min(available, max(0, limit - usage + _reclaimable(folder / "memory.stat")))
    return Memory(total, available)


def _cgroups(root: Path) -> list[tuple[Path, str, str]]:
    """The memory cgroups of this process with their ancestors, version 2 and 1."""
    base = root / "sys/fs/cgroup"
    found = []
    file = root / "proc/self/cgroup"
    for line in file.read_text().splitlines() if file.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = base, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = base / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = Path(os.path.normpath(f"{top}/{path}"))
        # In a container the path may be the host's: then only the mount point itself is visible.
        while folder != top and top in folder.parents:
            found.append((folder, *names))
            folder = folder.parent
        found.append((top, *names))
    return found


def _read_int(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _reclaimable(file: Path) -> int:
    """Bytes of page cache that the kernel gives back under pressure."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
