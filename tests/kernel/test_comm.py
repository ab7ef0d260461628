"""The shared-memory communicator, with ranks as threads (its waits release the GIL) and, once, as
real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from radix_kernels import _loader
from radix_kernels.comm import ShmCommunicator
from tests.child import IMPORT_PATH


def run_ranks(world, body, path, max_bytes=256, timeout=20.0):
    """body(comm) on every rank; returns the results, raises the first error."""
    results = [None] * world
    errors = []

    def main(rank):
        comm = ShmCommunicator(
            name=str(path), rank=rank, world_size=world, max_bytes=max_bytes, timeout=timeout
        )
        try:
            results[rank] = body(comm)
        except BaseException as error:
            comm.abort()
            errors.append(error)
        finally:
            comm.close()

    threads = [threading.Thread(target=main, args=(r,)) for r in range(world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    if errors:
        raise errors[0]
    return results


@pytest.fixture(params=["native", "reference"], autouse=True)
def implementation(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(_loader, "bind", None)
    elif not hasattr(_loader.bind, "Comm"):
        pytest.skip("no native communicator in this installation")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "comm"


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_all_reduce_sums_in_rank_order(path, world, dtype):
    shapes = [(0,), (1,), (7, 3), (64,), (129, 5)]  # the last ones exceed the segment of 256 bytes

    def inputs(rank, shape):
        g = torch.Generator().manual_seed(1000 * rank + sum(shape))
        return (torch.randn(shape, generator=g) * 50).to(dtype)

    def body(comm):
        out = []
        for shape in shapes:
            t = inputs(comm.rank, shape)
            assert comm.all_reduce(t) is t
            out.append(t)
        return out

    per_rank = run_ranks(world, body, path)
    for i, shape in enumerate(shapes):
        wide = torch.int64 if dtype == torch.int64 else torch.float32
        want = inputs(0, shape).to(wide)
        for r in range(1, world):
            want = want + inputs(r, shape).to(wide)
        for r in range(world):
            assert torch.equal(per_rank[r][i], want.to(dtype))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gathers_and_broadcast(path, world):
    def body(comm):
        for n in (0, 1, 31, 32, 33, 500):
            mine = torch.full((n, 3), float(comm.rank + 1))
            out = torch.full((world, n, 3), float("nan"))
            comm.all_gather(mine, out)
            for r in range(world):
                assert torch.equal(out[r], torch.full((n, 3), float(r + 1)))
            for root in range(world):
                if comm.rank == root:
                    got = comm.gather(mine, torch.full_like(out, float("nan")), root=root)
                    assert torch.equal(got, out)
                else:
                    assert comm.gather(mine, root=root) is None
                b = torch.arange(n, dtype=torch.int32) * (comm.rank + 1)
                comm.broadcast(b, root)
                assert torch.equal(b, torch.arange(n, dtype=torch.int32) * (root + 1))
        comm.barrier()
        return True

    assert all(run_ranks(world, body, path))


def test_many_exchanges_with_uneven_ranks_never_mix(path):
    """A fast rank must not overwrite what a slow one still reads."""

    def body(comm):
        for step in range(300):
            if (step + comm.rank) % 7 == 0:
                time.sleep(0.0005)
            t = torch.tensor([float(step * (comm.rank + 1)), -1.0])
            comm.all_reduce(t)
            assert t.tolist() == [step * 3.0, -2.0]
            b = torch.tensor([step if comm.rank == 0 else -1], dtype=torch.int32)
            comm.broadcast(b)
            assert b.item() == step

    run_ranks(2, body, path)


def test_a_missing_rank_times_out_and_is_named(path):
    comm = ShmCommunicator(name=str(path), rank=0, world_size=3, max_bytes=64, timeout=0.2)
    assert comm.aborted_by is None
    with pytest.raises(RuntimeError, match=r"rank\(s\) \[1, 2\] did not arrive in 0.2 s"):
        comm.all_reduce(torch.ones(3))
    other = ShmCommunicator(name=str(path), rank=1, world_size=3, max_bytes=64, timeout=60)
    with pytest.raises(RuntimeError, match="aborted by rank 0"):
        other.barrier()
    assert comm.aborted_by == other.aborted_by == 0
    other.close()
    assert other.aborted_by is None


def test_abort_ends_a_wait_at_once(path):
    comm = ShmCommunicator(name=str(path), rank=0, world_size=2, max_bytes=64, timeout=60)
    threading.Timer(0.1, comm.abort).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="aborted by rank 0"):
        comm.broadcast(torch.ones(3))
    assert time.monotonic() - start < 30  # far below the 60 s of the group


def test_bad_arguments(path):
    for rank, world, size in ((2, 2, 64), (-1, 2, 64), (0, 0, 64), (0, 1, 7), (0, 1, 0)):
        with pytest.raises(ValueError, match="rank|max_bytes"):
            ShmCommunicator(name=str(path), rank=rank, world_size=world, max_bytes=size)
    comm = ShmCommunicator(name=str(path), rank=0, world_size=1, max_bytes=64)
    with pytest.raises(ValueError, match="contiguous"):
        comm.all_reduce(torch.ones(4, 4).t())
    with pytest.raises(ValueError, match="out "):
        comm.all_gather(torch.ones(4), torch.ones(4))
    with pytest.raises(ValueError, match="root"):
        comm.broadcast(torch.ones(4), root=1)
    with pytest.raises(ValueError, match="must pass out"):
        comm.gather(torch.ones(4))


def test_an_element_larger_than_a_segment(path):
    comm = ShmCommunicator(name=str(path), rank=0, world_size=1, max_bytes=8)
    for tensor in (torch.ones(3, dtype=torch.complex128), torch.ones((), dtype=torch.complex128)):
        with pytest.raises(ValueError, match="element has 16 bytes, a segment 8"):
            comm.broadcast(tensor)
    assert comm.all_reduce(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]


_CHILD = """
import sys, torch
from radix_kernels import _loader
from radix_kernels.comm import ShmCommunicator
comm = ShmCommunicator(f"/proc/self/fd/{sys.argv[1]}", 1, 2, max_bytes=1 << 16)
t = torch.arange(50_000, dtype=torch.float32)
comm.all_reduce(t)
assert torch.equal(t, 3 * torch.arange(50_000.)), "sum"
comm.barrier()
"""


def test_two_processes_over_an_anonymous_file():
    fd = os.memfd_create("comm")
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(fd)], pass_fds=[fd], env=env, stderr=subprocess.PIPE
    )
    comm = ShmCommunicator(name=f"/proc/self/fd/{fd}", rank=0, world_size=2, max_bytes=1 << 16)
    os.close(fd)
    t = 2 * torch.arange(50_000, dtype=torch.float32)
    comm.all_reduce(t)
    assert torch.equal(t, 3 * torch.arange(50_000, dtype=torch.float32))
    comm.barrier()
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err.decode()
