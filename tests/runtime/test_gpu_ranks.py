"""The communicator of GPU ranks without GPUs: shared memory stands in for the peer kernels, gloo
for NCCL."""

from __future__ import annotations

import tempfile
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from radix_runtime import distributed, ops
from radix_runtime.config import ServerArgs
from radix_runtime.device import Device
from radix_runtime.distributed import CommunicatorAborted, Gpus, SharedMemory, connect

GPU = Device("cuda", torch.device("cpu", 0))


class Peers:
    """GpuCommunicator's collectives over the group itself; counts them."""

    def __init__(self, group, device, *, max_bytes, timeout):
        self.group = group
        self.calls = 0
        self.fused = 0
        self.broken = False

    def all_reduce(self, tensor):
        self.calls += 1
        return self.group.all_reduce(tensor)

    def all_gather(self, tensor, out):
        self.calls += 1
        return self.group.all_gather(tensor, out)

    def all_reduce_add_rmsnorm(self, tensor, residual, weight, eps):
        self.fused += 1
        residual += self.group.all_reduce(tensor)
        return tensor.copy_(ops.rmsnorm(residual, weight, eps))

    def check(self):
        if self.broken:
            raise RuntimeError("communicator: rank 1 did not arrive in 60 s")


class Unreachable:
    def __init__(self, *args, **options):
        raise NotImplementedError("GPU collectives, rank 1: no way to rank 0")


class Nccl:
    """Made as ProcessGroupNCCL is."""

    class Options:
        pass

    made = 0

    def __new__(cls, store, rank, size, options):
        assert isinstance(options, cls.Options)
        cls.made += 1
        return dist.ProcessGroupGloo(store, rank=rank, size=size, timeout=timedelta(seconds=30))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(ops, "GpuCommunicator", Peers)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(Nccl, "made", 0)


def run_ranks(path, body, world=2, **settings):
    """body(group) on each rank, a thread each; their results in rank order."""
    args = ServerArgs(device="cuda", tp_size=world, **settings)
    results = [None] * world

    def main(rank):
        group = connect(args, str(path), rank, GPU)
        try:
            group.open(GPU)
            results[rank] = body(group)
        except BaseException as error:
            group.abort()
            results[rank] = error
        finally:
            group.close()

    threads = [threading.Thread(target=main, args=[rank]) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def exchange(group):
    mine = torch.arange(6.0).view(2, 3) + 10 * group.rank
    total = group.all_reduce(mine.clone())
    rows = group.all_gather(mine.t())  # not contiguous
    part = group.gather(mine)
    ids = torch.full((4,), group.rank + 7, dtype=torch.int32)
    group.broadcast(ids)
    group.check()
    return total, rows, part, ids


def check_exchange(results):
    want = torch.stack([torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(2)])
    for rank, (total, rows, part, ids) in enumerate(results):
        assert torch.equal(total, want.sum(0)) and torch.equal(rows, want.transpose(1, 2))
        assert torch.equal(part, want) if rank == 0 else part is None
        assert ids.tolist() == [7] * 4


def test_tensors_go_by_the_peer_kernels(tmp_path):
    def body(group):
        results = exchange(group)
        assert group._peers.calls == 4
        return results

    check_exchange(run_ranks(tmp_path / "group", body))
    assert Nccl.made == 0


def test_large_tensors_go_by_nccl(tmp_path, monkeypatch):
    monkeypatch.setitem(distributed._NCCL_FROM, 2, 100)

    def body(group):
        results = exchange(group)
        large = group.all_reduce(torch.full((50,), float(group.rank + 1)))
        assert large.tolist() == [3.0] * 50 and group._peers.calls == 4
        return results

    check_exchange(run_ranks(tmp_path / "group", body))
    assert Nccl.made == 2


def add_and_norm(group, tokens, hidden, dtype=torch.float32):
    """The result, its definition, and how often the group's kernel ran."""
    g = torch.Generator().manual_seed(3)
    parts = torch.randn(2, tokens, hidden, generator=g).to(dtype)
    residual = torch.randn(tokens, hidden, generator=g).to(dtype)
    weight = torch.randn(hidden, generator=g)
    want = residual.double() + parts.double().sum(0)
    normed = want * (want.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    out = group.all_reduce_add_rmsnorm(parts[group.rank].clone(), residual, weight, 1e-5)
    bound = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(residual.double(), want, atol=bound, rtol=bound)
    torch.testing.assert_close(out.double(), normed, atol=bound, rtol=bound)
    return 0 if group._peers is None else group._peers.fused


@pytest.mark.parametrize(
    ("tokens", "hidden", "dtype", "fused"),
    [
        (3, 8, torch.float32, 1),
        (1, 8192, torch.float32, 1),  # rows of 32 KiB
        (1, 8196, torch.float32, 0),
        (2, 10, torch.float32, 0),  # rows of 40 bytes
        (5, 64, torch.bfloat16, 1),
    ],
)
def test_sums_with_a_norm(tmp_path, tokens, hidden, dtype, fused):
    def body(group):
        assert group.fuses_norms
        return add_and_norm(group, tokens, hidden, dtype)

    assert run_ranks(tmp_path / "group", body) == [fused, fused]


def test_large_sums_with_a_norm_go_by_nccl(tmp_path, monkeypatch):
    monkeypatch.setitem(distributed._NCCL_FROM, 2, 100)
    assert run_ranks(tmp_path / "group", lambda group: add_and_norm(group, 5, 8)) == [0, 0]
    assert Nccl.made == 2


def test_sums_with_a_norm_by_nccl_alone(tmp_path):
    def body(group):
        assert not group.fuses_norms
        return add_and_norm(group, 3, 8)

    assert run_ranks(tmp_path / "group", body, disable_custom_all_reduce=True) == [0, 0]


@pytest.mark.parametrize("how", ["flag", "unreachable"])
def test_nccl_alone(tmp_path, monkeypatch, caplog, how):
    if how == "unreachable":
        monkeypatch.setattr(ops, "GpuCommunicator", Unreachable)
    check_exchange(run_ranks(tmp_path / "group", exchange, disable_custom_all_reduce=how == "flag"))
    assert Nccl.made == 2
    assert ("no way to rank 0: NCCL carries all tensors" in caplog.text) == (how == "unreachable")


def test_a_wait_that_failed_on_the_device_is_an_error(tmp_path):
    def body(group):
        group.check()
        group._peers.broken = True
        with pytest.raises(RuntimeError, match="rank 1 did not arrive"):
            group.check()

    run_ranks(tmp_path / "group", body)


def test_no_file_is_left_where_ranks_do_not_find_each_other(tmp_path, monkeypatch):
    def fails(store, rank, size, options):
        raise RuntimeError("no way to rank 1")

    fails.Options = Nccl.Options
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fails, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="no way|aborted"):
        run_ranks(tmp_path / "group", exchange, disable_custom_all_reduce=True)
    assert not list(tmp_path.glob("radix-nccl-*"))


class NcclInGraphs:
    """As ProcessGroupNCCL is whose work lies in captured graphs: it aborts once they are gone."""

    def __init__(self):
        self.asked = threading.Event()
        self.graphs_are_gone = threading.Event()
        self.aborted = False

    def abort(self):
        self.asked.set()
        assert self.graphs_are_gone.wait(30)
        self.aborted = True


def test_an_abort_does_not_wait_for_graphs_that_hold_nccl_s_work(tmp_path):
    nccl = NcclInGraphs()

    def body(group):
        if group.rank == 1:
            return True
        group._nccl = nccl
        group.check()
        group.abort()  # a wait here would be for ever: the graphs go after it
        group.abort()
        assert nccl.asked.wait(30)
        with pytest.raises(CommunicatorAborted, match="by rank 0"):
            group.check()
        nccl.graphs_are_gone.set()
        return True

    assert run_ranks(tmp_path / "group", body) == [True, True]
    assert nccl.aborted  # `close` has waited for it


def test_cpu_ranks_keep_shared_memory(tmp_path):
    group = connect(ServerArgs(tp_size=1), str(tmp_path / "group"), 0, Device.resolve("cpu"))
    assert type(group) is SharedMemory and not isinstance(group, Gpus)
    group.open(Device.resolve("cpu"))
    group.check()
    group.close()


@pytest.mark.parametrize(
    "name", ["barrier", "check", "all_reduce", "all_gather", "gather", "broadcast"]
)
@pytest.mark.parametrize("device", [Device.resolve("cpu"), GPU], ids=["cpu", "gpu"])
def test_an_abort_has_a_type_of_its_own(tmp_path, device, name):
    """On the rank that waits and on the one that aborted; by the peer kernels too."""
    args = ServerArgs(tp_size=2)
    path = str(tmp_path / "group")
    groups = [connect(args, path, rank, device) for rank in range(2)]
    for group in groups:
        group.open(device)
    groups[1].abort()
    for group in groups:
        given = [] if name in ("barrier", "check") else [torch.ones(3)]
        with pytest.raises(CommunicatorAborted, match="aborted by rank 1"):
            getattr(group, name)(*given)


def test_a_late_rank_is_no_abort(tmp_path):
    """The rank that has waited says which one is missing; to the others it is an abort."""
    args = ServerArgs(tp_size=3)
    cpu = Device.resolve("cpu")
    groups = [connect(args, str(tmp_path / "group"), rank, cpu) for rank in range(2)]
    with pytest.raises(RuntimeError, match=r"rank\(s\) \[1, 2\] did not arrive") as late:
        groups[0].barrier(0.2)
    assert type(late.value) is RuntimeError
    with pytest.raises(CommunicatorAborted, match="aborted by rank 0"):
        groups[1].barrier()


def test_other_errors_of_a_collective_stay_what_they_are(tmp_path):
    group = connect(ServerArgs(tp_size=1), str(tmp_path / "group"), 0, Device.resolve("cpu"))
    with pytest.raises(ValueError, match="contiguous"):
        group.all_reduce(torch.ones(3, 2).t())
    group.abort()
    with pytest.raises(ValueError, match="contiguous"):
        group.all_reduce(torch.ones(3, 2).t())
