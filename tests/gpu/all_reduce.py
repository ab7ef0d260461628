"""The GPU collectives between real ranks, a process and a GPU each.

    python -m tests.gpu.all_reduce --ranks 4

Sums, bits on every rank, mixed sizes in a row, CUDA graphs beside other work with a rank delayed at
random, a rank that does not come and one that is killed. Ranks beyond the number of GPUs share
them. That is slow, since the kernels of two processes take turns, so there are fewer calls.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import radix_kernels as rk
from radix_kernels import reference
from tests.gpu.ranks import MAX_BYTES, Rank, connect, spawn

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CHANNELS = 128  # of a communicator


def bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes."""
    return x.contiguous().view(torch.uint8)


def check_sums(r: Rank) -> str:
    """Every dtype, size, algorithm and alignment, bit for bit as the reference."""
    count = 0
    sizes = [0, 1, 7, 8, 13, 511, 4096, 4097, 100_003, 9_000_000]
    if r.shared:
        sizes = [0, 1, 13, 4097, 100_003]
    for dtype in DTYPES:
        for n in sizes:
            for algorithm in ("auto", "one_shot", "two_shot"):
                for offset in (0, 1):  # an unaligned view
                    inputs = r.of_all_ranks((n,), dtype, seed=n % 97)
                    room = torch.full((n + 9,), float("nan"), dtype=dtype, device=r.device)
                    out = room[offset : offset + n]
                    x = torch.cat([inputs.new_zeros(offset), inputs[r.gpu.rank]])[offset:]
                    got = r.gpu.all_reduce(x, out, algorithm=algorithm)
                    want = reference.all_reduce(inputs, compute_dtype=torch.float32)
                    assert got is out and torch.equal(out, want), (dtype, n, algorithm, offset)
                    assert (
                        torch.isnan(room[:offset]).all() and torch.isnan(room[offset + n :]).all()
                    )
                    assert torch.equal(r.gpu.all_reduce(x, algorithm=algorithm), want)
                    count += 2
            r.same_everywhere(x)
    return f"{count} sums"


def check_odd_values(r: Rank) -> str:
    """NaN in every form, infinities, zeros of both signs, words that look like the empty mark."""
    for dtype in DTYPES:
        word = torch.int32 if dtype == torch.float32 else torch.int16
        odd = torch.tensor([-1, -2, 0, 1], dtype=word, device=r.device).view(dtype)
        values = torch.tensor(
            [-0.0, 0.0, float("inf"), -float("inf"), float("nan")], device=r.device
        ).to(dtype)
        mine = torch.cat([odd, values]).repeat(50)
        for algorithm in ("one_shot", "two_shot"):
            x = r.gpu.all_reduce(mine.clone(), algorithm=algorithm)
            want = reference.all_reduce(
                mine.expand(r.gpu.world_size, -1), compute_dtype=torch.float32
            )
            assert torch.equal(x.isnan(), want.isnan()) and torch.equal(
                x.nan_to_num(7.0), want.nan_to_num(7.0)
            )
            assert torch.equal(torch.signbit(x[~x.isnan()]), torch.signbit(want[~x.isnan()]))
            r.same_everywhere(x)
    return "NaN, infinities, signed zeros, marks"


def check_gather_and_scatter(r: Rank) -> str:
    """all_gather of any dtype; reduce_scatter against the reference's sum."""
    world = r.gpu.world_size
    rank = r.gpu.rank
    for n in (0, 1, 3, 8, 1001, 200_000):
        for dtype in (torch.uint8, torch.int32, torch.int64, torch.bfloat16):
            mine = torch.full((n, 3), -1, device=r.device).to(dtype)
            mine[::2] = rank
            out = torch.zeros(world, n, 3, dtype=dtype, device=r.device)
            assert r.gpu.all_gather(mine, out) is out
            for other in range(world):
                want = torch.full((n, 3), -1, device=r.device).to(dtype)
                want[::2] = other
                assert torch.equal(bits(out[other]), bits(want)), (n, dtype)
        for dtype in DTYPES:
            inputs = r.of_all_ranks((world, n, 3), dtype, seed=n)
            out = torch.full((n, 3), float("nan"), dtype=dtype, device=r.device)
            r.gpu.reduce_scatter(inputs[rank].contiguous(), out)
            want = reference.all_reduce(inputs, compute_dtype=torch.float32)[rank]
            assert torch.equal(out, want), (n, dtype)
    return "any bits, parts of the sum"


def check_norm(r: Rank) -> str:
    """Residual and sums bit for bit, the norm within its tolerance, the same on every rank."""
    worst = 0.0
    longest = 2 * MAX_BYTES // _CHANNELS // r.gpu.world_size  # bytes of a row in one shot
    for dtype in DTYPES:
        for rows, hidden in ((1, 64), (3, 4096), (64, 8192), (300, 1024), (2, 2056), (17, 128)):
            for weight_dtype in dict.fromkeys((dtype, torch.float32)):
                for algorithm in ("auto", "one_shot", "two_shot"):
                    if algorithm == "one_shot" and hidden * dtype.itemsize > longest:
                        continue
                    inputs = r.of_all_ranks((rows, hidden), dtype, seed=rows)
                    residual = r.randn(99, (rows, hidden), dtype)
                    weight = r.randn(98, (hidden,), weight_dtype)
                    want_r, want = reference.all_reduce_add_rmsnorm(
                        inputs, residual, weight, 1e-5, compute_dtype=torch.float64
                    )
                    x = inputs[r.gpu.rank].clone()
                    res = residual.clone()
                    assert (
                        r.gpu.all_reduce_add_rmsnorm(x, res, weight, 1e-5, algorithm=algorithm) is x
                    )
                    assert torch.equal(res, want_r), (dtype, rows, hidden, algorithm)
                    error = float((x.double() - want.double()).norm() / want.double().norm())
                    limit = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}[dtype]
                    assert error < limit, (dtype, rows, hidden, error)
                    r.same_everywhere(x)
                    _check_quantized(r, inputs, residual, weight, algorithm, want)
                    worst = max(worst, error / limit)
    return f"largest error {worst:.2f} of the tolerance"


def _check_quantized(
    r: Rank,
    inputs: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    algorithm: str,
    want: torch.Tensor,
) -> None:
    rows, hidden = residual.shape
    for group in dict.fromkeys((hidden, 128)) if hidden % 128 == 0 else (hidden,):
        res = residual.clone()
        x = inputs[r.gpu.rank].clone()
        out = torch.zeros(rows, hidden, dtype=torch.float8_e4m3fn, device=r.device)
        scale = torch.full((rows, hidden // group), float("nan"), device=r.device)
        r.gpu.all_reduce_add_rmsnorm(
            x, res, weight, 1e-5, out=out, scale=scale, algorithm=algorithm
        )
        groups = want.double().view(rows, -1, group)
        want_scale = groups.abs().amax(-1).clamp_min(1e-10) / 448
        assert torch.allclose(scale.double(), want_scale, rtol=1e-2), (rows, hidden, group)
        got = out.double().view(rows, -1, group) * scale.double().unsqueeze(-1)
        # Half a step of three mantissa bits, or of the smallest one.
        bound = groups.abs() * 0.08 + scale.double().unsqueeze(-1) * 2**-9
        assert ((got - groups).abs() <= bound).all(), (rows, hidden, group)
        r.same_everywhere(out)
        r.same_everywhere(scale)


def check_mixed_sizes(r: Rank) -> str:
    """Calls of all kinds and sizes in a row: channels that idle, sides that change, ranks out of
    step."""
    rng = torch.Generator().manual_seed(5)
    world = r.gpu.world_size
    rank = r.gpu.rank
    calls = 150 if r.shared else 1500
    for i in range(calls):
        n = int(2 ** (float(torch.rand((), generator=rng)) * 18))
        kind = int(torch.randint(5, (), generator=rng))
        if int(torch.randint(world * 20, (), generator=rng)) == rank:
            time.sleep(0.002)
        if kind < 3:
            x = torch.full((n,), float(rank + i % 7), device=r.device, dtype=torch.bfloat16)
            r.gpu.all_reduce(x, algorithm=("auto", "one_shot", "two_shot")[kind])
            want = float(sum(k + i % 7 for k in range(world)))
            assert (x == want).all(), (i, n, kind)
        elif kind == 3:
            out = torch.zeros(world, n, dtype=torch.int32, device=r.device)
            r.gpu.all_gather(torch.full((n,), rank - 1, dtype=torch.int32, device=r.device), out)
            assert (out == torch.arange(-1, world - 1, device=r.device)[:, None]).all(), (i, n)
        else:
            parts = torch.full((world, n), float(rank), device=r.device)
            got = r.gpu.reduce_scatter(parts, parts.new_zeros(n))
            assert (got == float(sum(range(world)))).all(), (i, n)
    return f"{calls} calls"


@dataclass(frozen=True)
class FixedCall:
    """A collective between two norms, all launched dependent, on memory that stays where it is.
    `given`: what the first norm writes; `results`: what the others do."""

    run: Callable[[], object]
    given: torch.Tensor
    results: list[torch.Tensor]

    def poison(self) -> None:
        """Whatever is read before it is written is NaN."""
        for tensor in (self.given, *self.results):
            tensor.fill_(float("nan"))


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_reduce_add_rmsnorm")
_WIDTH = 64


def fixed_call(r: Rank, kind: str, rows: int, seed: int) -> FixedCall:
    """Of `rows` rows of _WIDTH numbers from each rank."""
    world = r.gpu.world_size
    weight = r.randn(98, (_WIDTH,), torch.bfloat16)
    parts = world if kind == "reduce_scatter" else 1
    source = r.randn(r.gpu.rank, (parts * rows, _WIDTH), torch.bfloat16, seed=seed)
    given = torch.empty_like(source)
    residual = r.randn(99, (rows, _WIDTH), torch.bfloat16, seed=seed)
    added = torch.empty_like(residual)
    out = source.new_empty(world * rows if kind == "all_gather" else rows, _WIDTH)
    seen = torch.empty_like(out)

    def collective() -> torch.Tensor:
        if kind == "all_reduce":
            r.gpu.all_reduce(given, out)
        elif kind == "all_gather":
            r.gpu.all_gather(given, out.view(world, rows, _WIDTH))
        elif kind == "reduce_scatter":
            r.gpu.reduce_scatter(given.view(world, rows, _WIDTH), out)
        else:
            r.gpu.all_reduce_add_rmsnorm(given, added, weight, 1e-5)
            return given
        return out

    def run() -> None:
        added.copy_(residual)
        rk.rmsnorm(source, weight, out=given)
        rk.rmsnorm(collective(), weight, out=seen)

    return FixedCall(run=run, given=given, results=[seen, added])


def check_graphs(r: Rank) -> str:
    """10,000 calls of each collective in replayed graphs, another stream busy, one rank delayed at
    random: the bits of a call by itself, which the other checks compare with the reference."""
    many_rows = (1, 64, 625, 4688)
    count, replays = (10, 5) if r.shared else (100, 100)
    calls = [fixed_call(r, kind, many_rows[i % 4], i) for i in range(count) for kind in KINDS]
    wants = []
    for call in calls:
        call.run()
        torch.cuda.synchronize()
        wants.append([tensor.clone() for tensor in call.results])
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call.run()
    other = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device=r.device)
    wrong = torch.zeros((), dtype=torch.int64, device=r.device)
    rng = torch.Generator().manual_seed(17)
    for _ in range(replays):
        if int(torch.randint(r.gpu.world_size, (), generator=rng)) == r.gpu.rank:
            time.sleep(float(torch.rand((), generator=rng)) * 0.02)
        with torch.cuda.stream(other):
            for _ in range(4):
                torch.mm(a, a)
        with torch.cuda.stream(stream):
            for call in calls:
                call.poison()
            graph.replay()
            for call, want in zip(calls, wants, strict=True):
                for found, wanted in zip(call.results, want, strict=True):
                    wrong += (found != wanted).sum()
    torch.cuda.synchronize()
    r.gpu.check()
    assert int(wrong) == 0, f"{int(wrong)} wrong elements"
    return f"{count * replays} calls of each collective"


CHECKS: tuple[Callable[[Rank], str], ...] = (
    check_sums,
    check_odd_values,
    check_gather_and_scatter,
    check_norm,
    check_mixed_sizes,
    check_graphs,
)


def run_checks(rank: int, world: int, path: str, names: list[str]) -> None:
    """The main function of a rank's process: the checks one after another."""
    r = connect(rank, world, path, timeout=30.0)
    for check in CHECKS:
        if names and check.__name__.removeprefix("check_") not in names:
            continue
        r.shm.barrier()
        start = time.monotonic()
        result = check(r)
        torch.cuda.synchronize()
        r.gpu.check()
        if rank == 0:
            print(f"{check.__name__}: {result} ({time.monotonic() - start:.1f} s)", flush=True)
    r.shm.barrier()
    r.gpu.close()


def run_missing_rank(rank: int, world: int, path: str, kill: bool) -> None:
    """The last rank stops coming, or dies; the others' waits end within their limit, and say
    why."""
    limit = 2.0
    r = connect(rank, world, path, timeout=limit)
    x = torch.ones(100_000, device=r.device)
    for _ in range(3):
        r.gpu.all_reduce(x)
    torch.cuda.synchronize()
    r.shm.barrier()
    if rank == world - 1:
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3 * limit)
        os._exit(0)
    time.sleep(0.2)
    start = time.monotonic()
    for _ in range(50):
        r.gpu.all_reduce(x)
    torch.cuda.synchronize()
    took = time.monotonic() - start
    try:
        r.gpu.check()
    except RuntimeError as error:
        late = f"rank {world - 1} did not arrive in 2 s"
        assert late in str(error) or "aborted by rank" in str(error), error
    else:
        raise AssertionError("no error")
    assert took < limit + 1, took
    try:  # and the hosts know as well
        r.shm.barrier()
    except RuntimeError as error:
        assert "aborted" in str(error), error
    else:
        raise AssertionError("the hosts did not notice")
    if rank == 0:
        print(f"{'killed' if kill else 'missing'} rank: an error after {took:.2f} s", flush=True)


def run_abort(rank: int, world: int, path: str) -> None:
    """A host's abort ends the waits of every GPU long before the limit."""
    r = connect(rank, world, path, timeout=60.0)
    x = torch.ones(1000, device=r.device)
    r.gpu.all_reduce(x)
    torch.cuda.synchronize()
    r.shm.barrier()
    start = time.monotonic()
    if rank == world - 1:
        time.sleep(0.5)
        r.gpu.abort()
    else:
        r.gpu.all_reduce(x)
        torch.cuda.synchronize()
    took = time.monotonic() - start
    assert took < 5, took
    try:
        r.gpu.check()
    except RuntimeError as error:
        assert f"aborted by rank {world - 1}" in str(error), error
    else:
        raise AssertionError("no error")
    if rank == 0:
        print(f"abort: waits ended {took - 0.5:.3f} s later", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--checks", nargs="*", default=[], help="only these")
    args = parser.parse_args()
    good = spawn(args.ranks, run_checks, args.checks)
    if not args.checks:
        good &= spawn(args.ranks, run_abort)
        good &= spawn(args.ranks, run_missing_rank, False)
        good &= spawn(args.ranks, run_missing_rank, True, dies=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
