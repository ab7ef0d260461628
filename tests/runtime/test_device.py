"""The device facade on the CPU: an ordered stream, and memory within the cgroup's limits."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from radix_runtime import device
from radix_runtime.device import Device, Memory, OutOfMemory, cpu_memory
from radix_runtime.errors import ConfigError

GIB = 1 << 30


def test_a_stream_runs_in_order_while_the_caller_goes_on() -> None:
    stream = Device.resolve("cpu").stream()
    gate = threading.Event()
    seen: list[int] = []

    def first() -> str:
        assert gate.wait(60)
        seen.append(1)
        return "one"

    tickets = [stream.submit(first), stream.submit(lambda: seen.append(2))]
    assert not any(t.done() for t in tickets) and seen == []
    gate.set()
    assert tickets[1].result() is None and seen == [1, 2]
    assert tickets[0].done() and tickets[0].result() == "one"
    stream.shutdown()


def test_an_error_reaches_its_own_ticket_only() -> None:
    stream = Device.resolve("cpu").stream()
    bad = stream.submit(lambda: 1 // 0)
    good = stream.submit(lambda: 3)
    with pytest.raises(ZeroDivisionError):
        bad.result()
    assert good.result() == 3
    stream.shutdown()


def test_shutdown_waits() -> None:
    stream = Device.resolve("cpu").stream()
    seen: list[int] = []
    for i in range(20):
        stream.submit(lambda i=i: seen.append(i))
    stream.shutdown()
    assert seen == list(range(20))


def test_a_wait_for_a_gpu_sleeps_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def query(self) -> bool:
            calls.append("query")
            return calls.count("query") == 4

    monkeypatch.setattr(device.time, "sleep", lambda seconds: calls.append("sleep"))
    future = device._GpuFuture(7, event=Event(), check=lambda: calls.append("check"))
    assert not future.done()
    assert future.result() == 7
    assert calls == ["query", "query", "sleep", "query", "sleep", "query", "check"]


def test_resolve() -> None:
    cpu = Device.resolve("cpu")
    assert cpu.is_cpu and cpu.torch_device == torch.device("cpu")
    with pytest.raises(ConfigError, match="--device tpu is unknown"):
        Device.resolve("tpu")
    if not torch.cuda.is_available():
        assert Device.resolve("auto") == cpu
        with pytest.raises(ConfigError, match="torch sees no GPU"):
            Device.resolve("cuda")


def machine(root: Path, files: dict[str, str]) -> Path:
    meminfo = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB\nHugePages: 0\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, Memory(64 * GIB, 40 * GIB)),
        (
            {"proc/self/cgroup": "0::/a\n", f"{V2}/a/memory.max": "max\n"},
            Memory(64 * GIB, 40 * GIB),
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{V2}/a/memory.max": f"{8 * GIB}\n",
                f"{V2}/a/memory.current": f"{3 * GIB}\n",
                f"{V2}/a/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
                f"{V2}/a/b/memory.max": "max\n",
                f"{V2}/a/b/memory.current": "5\n",
            },
            Memory(8 * GIB, 6 * GIB),
        ),
        (  # in a container: the path is the host's, the mount point is the container's own
            {
                "proc/self/cgroup": "0::/../../kubepods/x\n",
                f"{V2}/memory.max": f"{4 * GIB}\n",
                f"{V2}/memory.current": f"{5 * GIB}\n",
            },
            Memory(4 * GIB, 0),
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/z\n4:memory:/y\n",
                f"{V1}/y/memory.limit_in_bytes": f"{16 * GIB}\n",
                f"{V1}/y/memory.usage_in_bytes": f"{GIB}\n",
                f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
                f"{V1}/memory.usage_in_bytes": f"{GIB}\n",
            },
            Memory(16 * GIB, 15 * GIB),
        ),
    ],
)
def test_memory_respects_the_cgroup(
    files: dict[str, str], expected: Memory, tmp_path: Path
) -> None:
    assert cpu_memory(machine(tmp_path, files)) == expected


def test_memory_of_this_machine() -> None:
    memory = Device.resolve("cpu").memory()
    assert 0 < memory.available <= memory.total


def test_a_failed_allocation_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as host:
        torch.empty(1 << 55)
    assert OutOfMemory.of(host.value) == OutOfMemory("tried to allocate 144115188075855872 bytes")
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.50 GiB. GPU 0 has 70 GiB")
    assert OutOfMemory.of(gpu) == OutOfMemory("Tried to allocate 9.50 GiB")
    assert OutOfMemory("Tried to allocate 9.50 GiB").size == 9.5 * GIB
    assert OutOfMemory("tried to allocate 144 bytes").size == 144
    assert OutOfMemory("").size == 0
    assert OutOfMemory.of(torch.OutOfMemoryError("no room for a graph")) == OutOfMemory("")
    assert OutOfMemory.of(MemoryError()) == OutOfMemory("")
    assert OutOfMemory.of(RuntimeError("out of host memory")) == OutOfMemory("")  # the wheel's
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)
    assert OutOfMemory.of(other.value) is None
    # An error of our own is not one because of its words.
    assert OutOfMemory.of(ConfigError("we tried to allocate 3 bytes")) is None
