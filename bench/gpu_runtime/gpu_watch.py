"""What nvidia-smi sees of the first GPU that CUDA sees, while something runs."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_FIELDS = {"clocks.sm": "sm_mhz", "power.draw": "watts", "temperature.gpu": "celsius"}


@contextmanager
def watched_gpu() -> Iterator[dict[str, float]]:
    """Filled at the end of the block with means over it; empty where there is no nvidia-smi."""
    command = [
        "nvidia-smi",
        f"--id={_first_gpu()}",
        f"--query-gpu={','.join(_FIELDS)}",
        "--format=csv,noheader,nounits",
        "--loop-ms=200",
    ]
    seen: dict[str, float] = {}
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        yield seen
        return
    try:
        yield seen
    finally:
        process.terminate()
        lines = (process.communicate()[0] or "").splitlines()
        samples = [sample for sample in map(_numbers, lines) if sample]
        for index, name in enumerate(_FIELDS.values()):
            if samples:
                seen[name] = statistics.mean(sample[index] for sample in samples)


def _first_gpu() -> str:
    """Of those that CUDA_VISIBLE_DEVICES names, by index or UUID, as `nvidia-smi --id` takes it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"


def _numbers(line: str) -> list[float]:
    """The fields of a line; none of one that was cut short or says that it does not know."""
    try:
        numbers = [float(part) for part in line.split(",")]
    except ValueError:
        return []
    return numbers if len(numbers) == len(_FIELDS) else []


def gpu_name() -> str | None:
    """Name and driver of the first GPU that CUDA sees; None where there is no nvidia-smi."""
    query = "--query-gpu=name,driver_version"
    command = ["nvidia-smi", f"--id={_first_gpu()}", query, "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
