"""Profiler: torch's profiler on one rank, started and stopped by command."""

import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from ..device import Device

_NO_SPAN = nullcontext()


class Profiler:
    """Used on the thread that runs the steps: torch records the operations of that thread, and on a
    GPU its kernels. The trace grows with every step until `stop`."""

    def __init__(self, rank: int, device: Device) -> None:
        self._rank = rank
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        if not device.is_cpu:
            self._activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._device = device
        self._profile: torch.profiler.profile | None = None
        self._file = Path()

    def start(self, directory: str) -> Path:
        """Begins a trace; returns the file in `directory` that `stop` will write. Raises
        RuntimeError while one is running, OSError where the file cannot be."""
        if self._profile is not None:
            raise RuntimeError(f"already profiling into {self._file}")
        os.makedirs(directory, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        file = Path(directory, f"radix-{stamp}-rank{self._rank}.trace.json")
        file.touch()
        profile = torch.profiler.profile(activities=self._activities)
        profile.start()
        self._file = file
        self._profile = profile
        return file

    def stop(self) -> Path:
        """Writes the trace, in Chrome's format; returns its file. Raises RuntimeError if none is
        running."""
        if self._profile is None:
            raise RuntimeError("not profiling")
        profile = self._profile
        self._profile = None
        self._device.synchronize()
        profile.stop()
        profile.export_chrome_trace(str(self._file))
        return self._file

    def span(self, name: str) -> AbstractContextManager[object]:
        """Marks what runs inside in the trace; free of cost without one."""
        if self._profile is None:
            return _NO_SPAN
        return torch.profiler.record_function(name)
