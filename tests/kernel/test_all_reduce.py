"""The collectives between GPUs: their definition, their errors, and their device code run by
threads of the CPU; on a machine with several GPUs, the real thing (tests/gpu/all_reduce.py)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from radix_kernels import _loader, reference
from radix_kernels.comm import GpuCommunicator, ShmCommunicator
from tests.child import IMPORT_PATH
from tests.kernel import gpu_objects


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_run_in_rank_order_and_are_rounded_once(world, dtype, rng):
    inputs = (torch.randn(world, 5, 33, generator=rng) * 20).to(dtype)
    got = reference.all_reduce(inputs, compute_dtype=torch.float32)
    assert got.dtype == dtype and got.shape == (5, 33)
    total = inputs[0].float().clone()
    for rank in range(1, world):
        total += inputs[rank].float()
    assert torch.equal(got, total.to(dtype))
    exact = inputs.double().sum(0)
    bound = {torch.float32: 2e-7 * world, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    assert ((got.double() - exact).norm() / exact.norm()) < bound


def test_norm_is_that_of_the_residual_before_it_is_rounded(rng):
    inputs = torch.randn(2, 3, 64, generator=rng).bfloat16()
    residual = torch.randn(3, 64, generator=rng).bfloat16()
    weight = torch.randn(64, generator=rng)
    new, out = reference.all_reduce_add_rmsnorm(
        inputs, residual, weight, 1e-6, compute_dtype=torch.float64
    )
    total = reference.all_reduce(inputs, compute_dtype=torch.float32).double() + residual.double()
    assert torch.equal(new, total.bfloat16())
    normed = total / torch.sqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    assert torch.equal(out, normed.bfloat16())


def test_without_kernels_every_rank_is_told(tmp_path):
    if hasattr(_loader.bind, "GpuComm"):
        pytest.skip("this library has GPU collectives")
    group = ShmCommunicator(name=str(tmp_path / "comm"), rank=0, world_size=1, max_bytes=1 << 12)
    with pytest.raises(NotImplementedError, match="rank 0: .*(no GPU collectives|library)"):
        GpuCommunicator(group, 0)


@pytest.mark.parametrize("program, last", [("main", "abort: seen"), ("norm", "4 ranks: 500 norms")])
def test_device_code_on_threads(tmp_path, program, last):
    """Sequences of all collectives and sizes with ranks out of step, a rank that does not come, an
    abort; the norm."""
    threads = "constexpr int kThreads = 1024;"
    norm = (gpu_objects.ROOT / "kernel/csrc/gpu/comm/all_reduce_norm.cu").read_text()
    assert threads in norm
    (tmp_path / "all_reduce_norm.cu").write_text(
        norm.replace(threads, "constexpr int kThreads = 4;")
    )
    assert gpu_objects.run_emulated(program, tmp_path).splitlines()[-1] == last


def test_between_processes_on_gpus(request):
    """Sums, bits, graphs beside other work, a rank that is killed: each rank a process, two of them
    on a lone GPU."""
    gpus = torch.cuda.device_count()
    if request.config.getoption("--device") != "cuda" or not hasattr(_loader.bind, "GpuComm"):
        pytest.skip("needs --device cuda")
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    for world in (n for n in (2, 4, 8) if n <= max(gpus, 2)):
        command = [sys.executable, "-m", "tests.gpu.all_reduce", "--ranks", str(world)]
        done = subprocess.run(
            command, env=env, cwd=gpu_objects.ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
