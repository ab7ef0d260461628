"""The read bandwidth of some cores, measured beside every figure: it drifts with the machine's
other tenants."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_BYTES = 1 << 30  # far larger than any last-level cache's share


class ReadProbe:
    """One reader a core, each pinned there; needs a C compiler."""

    def __init__(self, cores: list[int]) -> None:
        self._read = _compiled()
        self._readers = [
            ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, {c}))
            for c in cores
        ]
        size = _BYTES // 8 // len(cores)
        # Each part is first touched by the thread that reads it.
        made = [reader.submit(np.full, size, 3, np.uint64) for reader in self._readers]
        self._parts = [m.result() for m in made]

    def gbs(self, seconds: float = 0.4) -> float:
        """The best rate over `seconds`, in 10^9 bytes a second."""
        best = 0.0
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            runs = [
                r.submit(self._read, p.ctypes.data, p.size)
                for r, p in zip(self._readers, self._parts, strict=True)
            ]
            for run in runs:
                run.result()
            best = max(best, sum(p.nbytes for p in self._parts) / (time.perf_counter() - start))
        return best / 1e9


def _compiled() -> Callable[[int, int], int]:
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/read_probe.so"
        source = str(Path(__file__).with_name("read_probe.c"))
        compiler = shutil.which("cc") or "gcc"
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, source, "-o", library], check=True)
        read = ctypes.CDLL(library).read_all
    read.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    read.restype = ctypes.c_uint64
    return read
