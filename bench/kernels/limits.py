"""The machine's own limits, measured just before the kernels: every share is of these."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from . import gpu_timing

CPU_SIDE = 1536
GPU_SIDE = 8192  # of the square products
SLOW_SIDE = 384
SLOW_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    """GB/s of memory bandwidth, reading and copying (bytes in plus bytes out; on the CPU both are
    the rate of reading). tflops: dense matrix rate by dtype, TFLOP/s, of the best library product
    seen."""

    device: str
    read_gbs: float
    copy_gbs: float
    tflops: dict[torch.dtype, float]

    def seconds(
        self, size: float, flops: float, dtype: torch.dtype, limit: str
    ) -> tuple[float, float]:
        """The least time for the bytes, at the rate that `limit` names, and for the arithmetic."""
        rate = self.read_gbs if limit == "read" else self.copy_gbs
        # A CPU without instructions for a type multiplies it as float32 at best, whatever the
        # library makes of it.
        tflops = max(self.tflops.get(dtype, 0.0), self.tflops[torch.float32])
        return size / rate / 1e9, flops / tflops / 1e12


def measure_limits(device: torch.device) -> Limits:
    """Takes a few seconds: memory rates and the largest square products of each dtype."""
    if device.type == "cpu":
        rate = _cpu_read_gbs()
        return Limits(
            device=_cpu_name(), read_gbs=rate, copy_gbs=rate, tflops=_matmul_tflops(device)
        )
    name = torch.cuda.get_device_name(device)
    return Limits(
        device=name,
        read_gbs=_gpu_read_gbs(device),
        copy_gbs=_gpu_copy_gbs(device),
        tflops=_matmul_tflops(device),
    )


def _best(run: object, seconds: float = 1.0) -> float:
    best = float("inf")
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        run()  # type: ignore[operator]
        best = min(best, time.perf_counter() - start)
    return best


def _cpu_read_gbs() -> float:
    data = torch.randint(0, 1000, (64 << 20,), dtype=torch.int64)  # 512 MiB
    return data.numel() * 8 / _best(data.sum) / 1e9


def _gpu_read_gbs(device: torch.device) -> float:
    src = torch.ones(1 << 30, device=device)
    read = gpu_timing.plain_read()

    def run() -> None:
        read(src)
        torch.cuda.synchronize()

    run()
    return src.numel() * 4 / _best(run) / 1e9


def _gpu_copy_gbs(device: torch.device) -> float:
    src = torch.randn(1 << 30, device=device)
    dst = torch.empty_like(src)

    def run() -> None:
        dst.copy_(src)
        torch.cuda.synchronize()

    return 2 * src.numel() * 4 / _best(run) / 1e9


def _cpu_side(dtype: torch.dtype) -> int:
    """CPU_SIDE; SLOW_SIDE where the library has no fast products of the type and would take half a
    minute for one."""
    x = torch.ones(SLOW_SIDE, SLOW_SIDE, dtype=dtype)
    torch.mm(x, x)
    start = time.perf_counter()
    torch.mm(x, x)
    return SLOW_SIDE if time.perf_counter() - start > SLOW_SECONDS else CPU_SIDE


def _matmul_tflops(device: torch.device) -> dict[torch.dtype, float]:
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        n = _cpu_side(dtype) if device.type == "cpu" else GPU_SIDE
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))

        def run(a: torch.Tensor = a, b: torch.Tensor = b) -> None:
            torch.mm(a, b)
            if device.type == "cuda":
                torch.cuda.synchronize()

        run()
        rates[dtype] = 2 * n**3 / _best(run) / 1e12
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        rates[torch.float8_e4m3fn] = _fp8_tflops(device)
    if device.type == "cuda" and torch.version.hip is None:
        rates[torch.int8] = _int8_tflops(device)
    return rates


def _fp8_tflops(device: torch.device) -> float:
    n = GPU_SIDE
    a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)

    def run() -> None:
        torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)
        torch.cuda.synchronize()

    run()
    return 2 * n**3 / _best(run) / 1e12


def _int8_tflops(device: torch.device) -> float:
    """Tera-operations a second, of sums without scales."""
    n = GPU_SIDE
    a, b = (torch.randint(-127, 128, (n, n), device=device, dtype=torch.int8) for _ in range(2))

    def run() -> None:
        torch._int_mm(a, b.t())
        torch.cuda.synchronize()

    run()
    return 2 * n**3 / _best(run) / 1e12


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as f:
        names = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {torch.get_num_threads()} threads"
