"""Device: the one place that knows CPU, CUDA and ROCm apart (outside kernels and weights)."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from .errors import ConfigError

T = TypeVar("T")

# What allocators count in.
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Memory(NamedTuple):
    """Bytes of a GPU or of the host; on the host both respect the limits of the cgroup."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A failed allocation, of host or of GPU memory. `wanted`: what the allocator said it tried to
    get ("Tried to allocate 9 GiB"), or "" where it did not say."""

    wanted: str

    @property
    def size(self) -> int:
        """The bytes of `wanted`; 0 where it does not say."""
        said = re.search(r"([\d.]+) (\w+)$", self.wanted)
        return int(float(said[1]) * _UNITS.get(said[2], 0)) if said else 0

    @classmethod
    def of(cls, error: BaseException) -> OutOfMemory | None:
        """What `error` says of a failed allocation; None when it is another error."""
        text = str(error)
        said = re.search(r"tried to allocate [\d.]+ \w+", text, re.IGNORECASE)
        wanted = said[0] if said else ""
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return cls(wanted)
        # torch and the kernel wheel have no class for host memory: a plain RuntimeError says it.
        if isinstance(error, RuntimeError) and (said or "out of host memory" in text):
            return cls(wanted)
        return None


@dataclass(frozen=True, slots=True)
class Device:
    """Where a rank computes. `kind` is cpu, cuda or rocm; `torch_device` is that of its tensors
    (torch calls ROCm "cuda")."""

    kind: str
    torch_device: torch.device

    @classmethod
    def resolve(cls, name: str = "auto", index: int = 0, count: int = 1) -> Device:
        """`name`: auto, cpu or cuda (NVIDIA or AMD). Makes a GPU the thread's current one. Raises
        ConfigError when GPU `index` is not there, or when there are fewer than `count`."""
        available = torch.cuda.is_available()
        if name == "cpu" or (name == "auto" and not available):
            return cls("cpu", torch.device("cpu"))
        if name not in ("auto", "cuda"):
            raise ConfigError(f"--device {name} is unknown")
        if not available:
            raise ConfigError("--device cuda: torch sees no GPU")
        needed = max(index + 1, count)
        if needed > torch.cuda.device_count():
            raise ConfigError(f"{needed} GPUs are needed, torch sees {torch.cuda.device_count()}")
        torch.cuda.set_device(index)
        return cls("rocm" if torch.version.hip else "cuda", torch.device("cuda", index))

    @property
    def is_cpu(self) -> bool:
        """Whether tensors are in host memory."""
        return self.kind == "cpu"

    def stream(self, check: Callable[[], None] = lambda: None) -> Executor:
        """Runs work in the order of `submit` while the caller goes on, so that overlap is one code
        path: on a GPU the caller's thread queues the work on a device stream, on the CPU one thread
        runs it (kernels release the GIL). A GPU's result calls `check` before it is given out,
        which raises when what the device computed is void."""
        if self.is_cpu:
            return ThreadPoolExecutor(max_workers=1, thread_name_prefix="radix-engine")
        return _GpuStream(self.torch_device, check)

    def own_stream(self) -> AbstractContextManager[object]:
        """Within it, what this thread queues goes to a stream of its own: GPUs record no graphs on
        the default one."""
        if self.is_cpu:
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.torch_device))

    def graph_recorder(self) -> GraphRecorder | None:
        """Records work as graphs; None where the device has none."""
        return None if self.is_cpu else _CudaGraphRecorder()

    def clock(self) -> DeviceClock:
        """Tells when the device's stream passes a point; used on the thread that queues its
        work."""
        return DeviceClock() if self.is_cpu else _GpuClock()

    def host_empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that this device copies from and to asynchronously. It may be dropped while a
        copy runs: torch's pinned allocator keeps it until the stream has passed."""
        return torch.empty(shape, dtype=dtype, pin_memory=not self.is_cpu)

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        """A copy of `tensor`, which no later step writes; on a GPU it is filled when the stream has
        passed."""
        if self.is_cpu:
            return tensor.numpy().copy()
        host = self.host_empty(*tensor.shape, dtype=tensor.dtype)
        return host.copy_(tensor, non_blocking=True).numpy()

    def memory(self) -> Memory:
        """Total and available bytes now, of this process's share of the host or of the GPU."""
        if self.is_cpu:
            return cpu_memory()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return Memory(total=total, available=free)

    def release_memory(self) -> None:
        """Gives memory that no tensor holds any more back to the system."""
        if not self.is_cpu:
            gc.collect()
            torch.cuda.empty_cache()

    def mark(self) -> Callable[[], bool]:
        """Tells, when it is called, whether the device is still busy with what has been queued on
        the current stream so far."""
        if self.is_cpu:
            return lambda: False
        event = torch.cuda.Event()
        event.record()
        return lambda: not event.query()

    def synchronize(self) -> None:
        """Waits until the device has done all that was queued."""
        if not self.is_cpu:
            torch.cuda.synchronize(self.torch_device)


class GraphRecorder(Protocol):
    """Records what work queues on the current stream, to queue it again at once."""

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Runs `work`, which must have run before, without executing what it queues. Returns what
        replays it, and its result, whose memory every replay writes anew."""


class _CudaGraphRecorder:
    """CUDA or HIP graphs that share one memory pool: while one is replayed, what another has left
    there, its result excepted, is lost."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        graph = torch.cuda.CUDAGraph()
        # `with torch.cuda.graph(..)` would collect garbage and empty torch's cache each time.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = work()
        except BaseException:
            with suppress(RuntimeError):  # it is invalid; what made it so is said by `work`
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay, result


class DeviceClock:
    """When a stream begins with a piece of work and when it has done it. Here, on the CPU, the
    stream is the thread that asks."""

    def start(self) -> Any:
        """A mark before work that is queued next."""
        return time.monotonic()

    def end(self) -> Any:
        """A mark behind the work since `start`."""
        return time.monotonic()

    def seconds(self, mark: Any) -> float:
        """When the stream passed `mark`, on the clock of time.monotonic(). Asked once it has, in
        the order of the marks."""
        return float(mark)


class _GpuMark(NamedTuple):
    event: torch.cuda.Event
    passed_at: float | None  # on the host's clock, where the stream had nothing else to do


class _GpuClock(DeviceClock):
    """Events on a GPU's stream. Their distances are the GPU's own, to half a microsecond; where
    they lie on the host's clock is set whenever work comes to an idle stream, and may drift by
    some 10 us a second while it is busy."""

    def __init__(self) -> None:
        self._queued: torch.cuda.Event | None = None  # the newest end
        self._passed: torch.cuda.Event | None = None  # the newest mark that was asked for
        self._passed_at = 0.0

    def start(self) -> _GpuMark:
        is_idle = self._queued is None or self._queued.query()
        event = _recorded_event()
        return _GpuMark(event, passed_at=time.monotonic() if is_idle else None)

    def end(self) -> _GpuMark:
        self._queued = _recorded_event()
        return _GpuMark(self._queued, passed_at=None)

    def seconds(self, mark: _GpuMark) -> float:
        if mark.passed_at is not None:
            self._passed_at = mark.passed_at
        elif self._passed is not None:
            # From mark to mark: a float32 of milliseconds since the start would grow coarse.
            self._passed_at += 1e-3 * self._passed.elapsed_time(mark.event)
        self._passed = mark.event
        return self._passed_at


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True, slots=True)
class Span:
    """From one mark of a clock to another."""

    clock: DeviceClock
    start: Any
    end: Any

    def seconds(self) -> tuple[float, float]:
        """When the stream passed both, on the clock of time.monotonic()."""
        start = self.clock.seconds(self.start)
        return start, self.clock.seconds(self.end)


# Between two looks at what a GPU computes; with the kernel's timer slack about 75 us. On an H200 a
# step of 0.6 ms is noticed 15 us later than by spinning, and the core is at 13 % (2026-11-23).
_POLL_SECONDS = 20e-6


class _GpuStream(Executor):
    def __init__(self, device: torch.device, check: Callable[[], None]) -> None:
        self._stream = torch.cuda.Stream(device)
        self._check = check

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with torch.cuda.stream(self._stream):
            value = work(*args, **kwargs)
            event = torch.cuda.Event()
            event.record()
        return _GpuFuture(value, event=event, check=self._check)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._stream.synchronize()


class _GpuFuture(Future[T]):
    """Done when the device has passed `event`."""

    def __init__(self, value: T, *, event: torch.cuda.Event, check: Callable[[], None]) -> None:
        super().__init__()
        self.set_result(value)
        self._event = event
        self._check = check

    def done(self) -> bool:
        return self._event.query()

    def result(self, timeout: float | None = None) -> T:
        # `synchronize` would spin a whole core; a blocking event wakes 200 us late.
        while not self._event.query():
            time.sleep(_POLL_SECONDS)
        self._check()
        return super().result()


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` on the device: on the CPU the array's own memory, on a GPU a copy that the host does
    not wait for (which takes pinned memory)."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def cpu_memory(root: Path = Path("/")) -> Memory:
    """Total and available memory of this process: the machine's, or the tightest cgroup's.
    `root`: the folder that holds proc and sys."""
    info = dict(re.findall(r"(\w+):\s+(\d+) kB", (root / "proc/meminfo").read_text()))
    total = int(info["MemTotal"]) * 1024
    available = int(info["MemAvailable"]) * 1024
    for folder, limit_name, usage_name in _cgroups(root):
        limit = _read_int(folder / limit_name)
        usage = _read_int(folder / usage_name)
        if limit is None or usage is None:
            continue
        free = max(0, limit - usage + _reclaimable(folder / "memory.stat"))
        total = min(total, limit)
        available = min(available, free)
    return Memory(total=total, available=available)


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """The memory cgroups of this process with their ancestors, and the names of the files that
    hold their limit and usage; version 2 and 1."""
    base = root / "sys/fs/cgroup"
    file = root / "proc/self/cgroup"
    for line in file.read_text().splitlines() if file.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = base
            limit = "memory.max"
            usage = "memory.current"
        elif "memory" in controllers.split(","):
            top = base / "memory"
            limit = "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        # In a container the path may be the host's: then only the mount point itself is visible.
        folder = Path(os.path.normpath(f"{top}/{path}"))
        while top in folder.parents:
            yield folder, limit, usage
            folder = folder.parent
        yield top, limit, usage


def _read_int(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _reclaimable(stat: Path) -> int:
    """Bytes of page cache that the kernel gives back under pressure."""
    text = stat.read_text() if stat.is_file() else ""
    inactive = re.search(r"^inactive_file (\d+)", text, re.MULTILINE)
    return int(inactive[1]) if inactive else 0
