"""Device: the one place that knows CPU, CUDA and ROCm apart (outside kernels and weights)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from .errors import ConfigError

T = TypeVar("T")


class Memory(NamedTuple):
    """Bytes. On the CPU both respect the limits of the cgroup."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class Device:
    """`kind` is cpu, cuda or rocm; `torch_device` that of tensors (ROCm is "cuda")."""

    kind: str
    torch_device: torch.device

    @classmethod
    def resolve(cls, name: str = "auto", index: int = 0, count: int = 1) -> Device:
        """`name`: auto, cpu or cuda (NVIDIA or AMD). Makes a GPU the current one of the thread.
        Raises ConfigError when it is not there, or fewer than `count`."""
        available = torch.cuda.is_available()
        if name == "cpu" or (name == "auto" and not available):
            return cls("cpu", torch.device("cpu"))
        if name not in ("auto", "cuda"):
            raise ConfigError(f"--device {name} is unknown")
        if not available:
            raise ConfigError("--device cuda: torch sees no GPU")
        if (needed := max(index + 1, count)) > torch.cuda.device_count():
            raise ConfigError(f"{needed} GPUs are needed, torch sees {torch.cuda.device_count()}")
        torch.cuda.set_device(index)
        return cls("rocm" if torch.version.hip else "cuda", torch.device("cuda", index))

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    def stream(self, check: Callable[[], None] = lambda: None) -> Executor:
        """Runs work in the order of `submit` while the caller goes on: on a GPU the caller's thread
        queues it on a device stream, on the CPU one thread runs it (kernels release the GIL). So
        overlap is one code path. `check` raises when what a GPU has done is void; a result asks it
        first."""
        return (
            ThreadPoolExecutor(1, "radix-engine")
            if self.is_cpu
            else _GpuStream(self.torch_device, check)
        )

    def host_empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that this device copies from and to asynchronously. It may be dropped while a
        copy runs: torch's pinned allocator keeps it until the stream has passed."""
        return torch.empty(shape, dtype=dtype, pin_memory=not self.is_cpu)

    def memory(self) -> Memory:
        if self.is_cpu:
            return cpu_memory()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return Memory(total, free)

    def synchronize(self) -> None:
        if not self.is_cpu:
            torch.cuda.synchronize(self.torch_device)


class _GpuStream(Executor):
    def __init__(self, device: torch.device, check: Callable[[], None]) -> None:
        self._stream, self._check = torch.cuda.Stream(device), check

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with torch.cuda.stream(self._stream):
            value = work(*args, **kwargs)
            event = torch.cuda.Event()
            event.record()
        return _GpuFuture(value, event, self._check)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._stream.synchronize()


class _GpuFuture(Future[T]):
    """Done when the device is."""

    def __init__(self, value: T, event: torch.cuda.Event, check: Callable[[], None]) -> None:
        super().__init__()
        self.set_result(value)
        self._event, self._check = event, check

    def done(self) -> bool:
        return self._event.query()

    def result(self, timeout: float | None = None) -> T:
        self._event.synchronize()
        self._check()
        return super().result()


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` on the device; on the CPU itself. From pinned memory: a copy from other memory makes
    the host wait."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def cpu_memory(root: Path = Path("/")) -> Memory:
    """Total and available memory of this process: the machine's, or the tightest cgroup's."""
    info = dict(re.findall(r"(\w+):\s+(\d+) kB", (root / "proc/meminfo").read_text()))
    total, available = int(info["MemTotal"]) * 1024, int(info["MemAvailable"]) * 1024
    for folder, limit_name, usage_name in _cgroups(root):
        try:
            limit, usage = (
                int((folder / limit_name).read_text()),
                int((folder / usage_name).read_text()),
            )
        except (OSError, ValueError):  # absent, or "max"
            continue
        stat = folder / "memory.stat"
        cache = re.search(r"^inactive_file (\d+)", stat.read_text() if stat.is_file() else "", re.M)
        free = (
            limit - usage + (int(cache[1]) if cache else 0)
        )  # the kernel gives page cache back under pressure
        total, available = min(total, limit), min(available, max(0, free))
    return Memory(total, available)


# The memory cgroups of this process with their ancestors, and the names of their limit and usage.
def _cgroups(root: Path) -> Iterator[tuple[Path, str, str]]:
    file = root / "proc/self/cgroup"
    for line in file.read_text().splitlines() if file.is_file() else []:
        _, controllers, path = line.split(":", 2)
        top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        if controllers:
            top, names = top / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if not controllers or "memory" in controllers.split(","):
            folder = Path(os.path.normpath(f"{top}/{path}"))
            # In a container the path may be the host's: then only the mount point itself is
            # visible.
            yield from ((f, *names) for f in (folder, *folder.parents) if top in f.parents)
            yield (top, *names)
